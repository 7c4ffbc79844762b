// Launches the metadata kernels, for the op itself and for those that begin with it.
#pragma once
#include "../args.h"
#include "launch.h"

namespace mxfp4::cuda {

// followed: kernels of the same call come next, and may start before these have ended.
void launch_metadata(const char* op, const MetadataArgs& args, const OnDevice& device, bool followed);

}  // namespace mxfp4::cuda
