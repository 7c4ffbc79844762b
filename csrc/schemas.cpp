// Every schema of the package, once. The .out overloads declare each argument they write with an alias set of its own
// and return nothing: an undeclared write compiles to a wrong program, and a returned alias cannot be functionalised.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(mxfp4_ops, m) {
  m.def(
      "get_cutlass_moe_mm_data(Tensor topk_ids, int num_experts, int n, int k, *, bool is_gated=True, "
      "Tensor? expert_map=None) -> (Tensor expert_offsets, Tensor blockscale_offsets, Tensor problem_sizes1, "
      "Tensor problem_sizes2, Tensor input_permutation, Tensor output_permutation, Tensor sorted_expert_ids)");
  m.def(
      "get_cutlass_moe_mm_data.out(Tensor topk_ids, int num_experts, int n, int k, *, bool is_gated=True, "
      "Tensor? expert_map=None, Tensor(a!) expert_offsets, Tensor(b!)? blockscale_offsets=None, "
      "Tensor(c!) problem_sizes1, Tensor(d!) problem_sizes2, Tensor(e!) input_permutation, "
      "Tensor(f!) output_permutation, Tensor(g!)? sorted_expert_ids=None) -> ()");

  m.def("shuffle_rows(Tensor input, Tensor dst2src_map) -> Tensor");
  m.def("shuffle_rows.out(Tensor input, Tensor dst2src_map, *, Tensor(a!) output) -> ()");

  m.def(
      "mxfp4_experts_quant(Tensor input, Tensor expert_offsets, Tensor blockscale_offsets, int n_experts, "
      "Tensor? sorted_expert_ids=None) -> (Tensor output, Tensor output_scale)");
  m.def(
      "mxfp4_experts_quant.out(Tensor input, Tensor expert_offsets, Tensor blockscale_offsets, int n_experts, "
      "Tensor? sorted_expert_ids=None, *, Tensor(a!) output, Tensor(b!) output_scale) -> ()");

  m.def(
      "silu_and_mul_mxfp4_experts_quant(Tensor input, Tensor expert_offsets, Tensor blockscale_offsets, int n_experts, "
      "Tensor? sorted_expert_ids=None) -> (Tensor output, Tensor output_scale)");
  m.def(
      "silu_and_mul_mxfp4_experts_quant.out(Tensor input, Tensor expert_offsets, Tensor blockscale_offsets, "
      "int n_experts, Tensor? sorted_expert_ids=None, *, Tensor(a!) output, Tensor(b!) output_scale) -> ()");

  m.def(
      "moe_permute_mxfp4_quant(Tensor hidden_states, Tensor topk_ids, int num_experts, int n, *, bool is_gated=True, "
      "Tensor? expert_map=None) -> (Tensor expert_offsets, Tensor blockscale_offsets, Tensor problem_sizes1, "
      "Tensor problem_sizes2, Tensor input_permutation, Tensor output_permutation, Tensor sorted_expert_ids, "
      "Tensor output, Tensor output_scale)");
  m.def(
      "moe_permute_mxfp4_quant.out(Tensor hidden_states, Tensor topk_ids, int num_experts, int n, *, "
      "bool is_gated=True, Tensor? expert_map=None, Tensor(a!) expert_offsets, Tensor(b!)? blockscale_offsets=None, "
      "Tensor(c!) problem_sizes1, Tensor(d!) problem_sizes2, Tensor(e!) input_permutation, "
      "Tensor(f!) output_permutation, Tensor(g!)? sorted_expert_ids=None, Tensor(h!) output, "
      "Tensor(i!) output_scale) -> ()");

  m.def(
      "mxfp4_dequantize(Tensor packed, Tensor scale, Tensor expert_offsets, Tensor blockscale_offsets, *, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "mxfp4_dequantize.out(Tensor packed, Tensor scale, Tensor expert_offsets, Tensor blockscale_offsets, *, "
      "ScalarType dtype, Tensor(a!) output) -> ()");
}
