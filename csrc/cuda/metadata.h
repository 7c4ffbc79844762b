// Launches the metadata kernels, for the op itself and for those that begin with it.
#pragma once
#include "../args.h"
#include "launch.h"

namespace mxfp4::cuda {

void launch_metadata(const char* op, const MetadataArgs& args, const OnDevice& device);

}  // namespace mxfp4::cuda
