// Small tensor helpers on the stable ABI, shared by the CPU and CUDA front ends.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

namespace mxfp4 {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// libtorch's own code of a dtype: ScalarType would refuse dtypes that shuffle_rows has no reason to refuse.
inline int32_t dtype_code(const Tensor& t) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

inline int32_t device_type(const Tensor& t) {
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type;
}

inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Tensor& like) {
  int64_t shape[2], strides[2], step = 1;
  const int64_t dim = static_cast<int64_t>(sizes.size());
  for (int64_t i = dim - 1; i >= 0; --i) {
    shape[i] = sizes.begin()[i];
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle;
  // The C interface keeps the reason, and its type, to itself.
  if (aoti_torch_empty_strided(dim, shape, strides, dtype, device_type(like), like.get_device_index(), &handle) !=
      AOTI_TORCH_SUCCESS)
    throw std::runtime_error("mxfp4_ops: could not allocate " +
                             std::to_string(step * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype))) +
                             " bytes; out of memory?");
  return Tensor(handle);
}

inline bool is_aligned(const Tensor& t, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % static_cast<uintptr_t>(bytes) == 0;
}

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline OptionalTensor as_contiguous(const OptionalTensor& t) {
  return t.has_value() ? OptionalTensor(as_contiguous(*t)) : t;
}

// A matrix whose rows a kernel can walk: columns next to each other, every row at a multiple of `alignment` bytes.
// Anything else is copied once into such a matrix.
inline Tensor as_rows(const Tensor& t, int64_t alignment) {
  const int64_t size = static_cast<int64_t>(t.element_size());
  const bool dense_columns = t.size(1) <= 1 || t.stride(1) == 1;
  const bool aligned = is_aligned(t, alignment) && (t.size(0) <= 1 || t.stride(0) * size % alignment == 0);
  if (dense_columns && aligned) return t;
  Tensor copy = empty({t.size(0), t.size(1)}, dtype_code(t), t);
  torch::stable::copy_(copy, t);
  return copy;
}

// Whether autograd would record what is done with a tensor. The C interface cannot be asked, but a view taken while
// grad mode is on is a leaf exactly if its source does not require grad.
inline bool records_grad(const Tensor& t) {
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::alias", "", stack.data(), TORCH_ABI_VERSION));
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_leaf", "", stack.data(), TORCH_ABI_VERSION));
  return !torch::stable::detail::to<bool>(stack[0]);
}

// A buffer of the caller that a kernel writes. A kernel gets `tensor()`, contiguous and aligned; where the caller's is
// not, that is a copy, which `commit` brings back. `keep`: the kernel leaves some bytes as they are.
class Written {
 public:
  Written(const Tensor& target, int64_t alignment, bool keep) : target_(target), tensor_(target) {
    direct_ = target.is_contiguous() && is_aligned(target, alignment);
    if (direct_) {
      copy();
      return;
    }
    tensor_ = torch::stable::new_empty(target, target.sizes());
    if (keep) torch::stable::copy_(tensor_, target_);
  }
  const Tensor& tensor() const { return tensor_; }
  void commit() {
    if (!direct_) copy();
  }

 private:
  // Copying a tensor to itself moves nothing and counts as a write, so that autograd notices one over what it has saved
  // and torch refuses one that it would refuse of its own ops, before a kernel writes.
  void copy() {
    if (aoti_torch_copy_(target_.get(), tensor_.get(), 0) != AOTI_TORCH_SUCCESS)
      throw std::runtime_error(
          "mxfp4_ops: torch refuses to write an out buffer; was it made under torch.inference_mode(), and is this "
          "outside?");
  }

  Tensor target_, tensor_;
  bool direct_;
};

template <typename T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}
template <typename T>
const T* data(const OptionalTensor& t) {
  return t.has_value() ? data<T>(*t) : nullptr;
}
template <typename T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace mxfp4
