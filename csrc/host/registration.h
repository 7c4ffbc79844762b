// The kernels of one backend, registered under its dispatch key.
#pragma once
#include <torch/csrc/stable/library.h>

#include "dequantize.h"
#include "experts_quant.h"
#include "metadata.h"
#include "moe_permute.h"
#include "shuffle_rows.h"

namespace mxfp4 {

template <typename Backend>
void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("get_cutlass_moe_mm_data", TORCH_BOX(&Metadata<Backend>::functional));
  m.impl("get_cutlass_moe_mm_data.out", TORCH_BOX(&Metadata<Backend>::out));
  m.impl("shuffle_rows", TORCH_BOX(&ShuffleRows<Backend>::functional));
  m.impl("shuffle_rows.out", TORCH_BOX(&ShuffleRows<Backend>::out));
  m.impl("mxfp4_experts_quant", TORCH_BOX((&ExpertsQuant<Backend, false>::functional)));
  m.impl("mxfp4_experts_quant.out", TORCH_BOX((&ExpertsQuant<Backend, false>::out)));
  m.impl("silu_and_mul_mxfp4_experts_quant", TORCH_BOX((&ExpertsQuant<Backend, true>::functional)));
  m.impl("silu_and_mul_mxfp4_experts_quant.out", TORCH_BOX((&ExpertsQuant<Backend, true>::out)));
  m.impl("moe_permute_mxfp4_quant", TORCH_BOX(&MoePermute<Backend>::functional));
  m.impl("moe_permute_mxfp4_quant.out", TORCH_BOX(&MoePermute<Backend>::out));
  m.impl("mxfp4_dequantize", TORCH_BOX(&Dequantize<Backend>::functional));
  m.impl("mxfp4_dequantize.out", TORCH_BOX(&Dequantize<Backend>::out));
}

}  // namespace mxfp4
