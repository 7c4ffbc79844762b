// Argument checks of the kernels. meta/checks.py makes the same checks in the same order with the same words for the
// fakes; tests/test_checks.py holds the two to each other.
#pragma once
#include <array>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace mxfp4 {

struct DtypeName {
  int32_t code;
  const char* name;
};

inline std::string dtype_name(int32_t code) {
  static const DtypeName names[] = {
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
      {torch_dtype_float8_e8m0fnu(), "float8_e8m0fnu"},
      {torch_dtype_float4_e2m1fn_x2(), "float4_e2m1fn_x2"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const DtypeName& n : names)
    if (n.code == code) return std::string("torch.") + n.name;
  return "dtype " + std::to_string(code);
}

inline std::string device_name(const Tensor& t) {
  const int32_t type = device_type(t);
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(t.get_device_index());
  return "device type " + std::to_string(type);
}

inline std::string shape_name(const Tensor& t) {
  std::ostringstream s;
  s << "shape [";
  for (int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.size(i);
  s << "]";
  return s.str();
}

using NamedTensor = std::pair<const char*, const Tensor*>;  // null: an optional argument that was not given

inline const Tensor* address(const Tensor& t) { return &t; }
inline const Tensor* address(const OptionalTensor& t) { return t.has_value() ? &*t : nullptr; }

// The checks of one call. Text is built only when a check fails.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  template <typename... Got>
  [[noreturn]] void fail(const char* arg, const std::string& must, const Got&... got) const {
    std::ostringstream s;
    s << op_ << ": " << arg << " must " << must << ", got ";
    ((s << got), ...);
    throw std::runtime_error(s.str());
  }

  void given(const char* arg, const Tensor& t) const {
    if (!t.defined()) fail(arg, "be a tensor", "None");
  }

  void dtype(const char* arg, const Tensor& t, std::initializer_list<int32_t> allowed) const {
    given(arg, t);
    one_of(arg, mxfp4::dtype_code(t), allowed, "have dtype ");
  }

  void one_of(const char* arg, int32_t code, std::initializer_list<int32_t> allowed, std::string must = "be ") const {
    for (int32_t a : allowed)
      if (a == code) return;
    size_t i = 0;
    for (int32_t a : allowed) must += (i++ ? " or " : "") + dtype_name(a);
    fail(arg, must, dtype_name(code));
  }

  void dims(const char* arg, const Tensor& t, int64_t dim, const char* layout) const {
    given(arg, t);
    if (t.dim() != dim) fail(arg, "be " + std::to_string(dim) + "-dimensional " + layout, shape_name(t));
  }

  void shape(const char* arg, const Tensor& t, std::initializer_list<int64_t> sizes, const char* layout) const {
    bool same = t.dim() == static_cast<int64_t>(sizes.size());
    for (size_t i = 0; same && i < sizes.size(); ++i) same = t.size(static_cast<int64_t>(i)) == sizes.begin()[i];
    if (same) return;
    std::ostringstream must;
    must << "have shape " << layout << " = [";
    for (size_t i = 0; i < sizes.size(); ++i) must << (i ? ", " : "") << sizes.begin()[i];
    must << "]";
    fail(arg, must.str(), shape_name(t));
  }

  // A tensor of one exact kind, and one that a kernel writes.
  void exact(const char* arg, const Tensor& t, int32_t code, std::initializer_list<int64_t> sizes, const char* layout,
             const char* like_arg, const Tensor& like) const {
    dtype(arg, t, {code});
    shape(arg, t, sizes, layout);
    device(arg, t, like_arg, like);
  }
  void buffer(const char* arg, const Tensor& t, int32_t code, std::initializer_list<int64_t> sizes, const char* layout,
              const char* like_arg, const Tensor& like) const {
    exact(arg, t, code, sizes, layout, like_arg, like);
    writable(arg, t);
  }

  void device(const char* arg, const Tensor& t, const char* like_arg, const Tensor& like) const {
    if (device_type(t) == device_type(like) && t.get_device_index() == like.get_device_index()) return;
    fail(arg, "be on the device of " + std::string(like_arg) + " (" + device_name(like) + ")", device_name(t));
  }

  void at_least(const char* arg, int64_t value, int64_t low) const {
    if (value < low) fail(arg, "be at least " + std::to_string(low), value);
  }

  void at_most(const char* arg, int64_t value, int64_t high) const {
    if (value > high) fail(arg, "be at most " + std::to_string(high), value);
  }

  // width: columns of the tensor, of which K are quantised.
  void columns(const char* arg, int64_t width, int64_t unit, const char* layout) const {
    if (width <= 0 || width % unit != 0)
      fail(arg, "have a positive multiple of " + std::to_string(unit) + " columns " + layout, width);
  }

  void column_count(const char* arg, int64_t width) const {
    if (width > INT32_MAX) fail(arg, "have fewer than 2^31 columns", width);
  }

  // Rows, and the scale rows that they may need, are counted in int32.
  void row_count(const char* arg, int64_t rows, int64_t scale_rows) const {
    if (rows > INT32_MAX) fail(arg, "have fewer than 2^31 routed rows", rows);
    if (scale_rows > INT32_MAX) fail(arg, "need fewer than 2^31 scale rows", scale_rows);
  }

  // What a kernel writes: no element may stand for another.
  void writable(const char* arg, const Tensor& t) const {
    for (int64_t i = 0; i < t.dim(); ++i)
      if (t.stride(i) == 0 && t.size(i) > 1) fail(arg, "not be expanded", "stride 0 in dimension " + std::to_string(i));
  }

  // Results are bytes, or lie in the caller's buffers: no gradient can pass, and none may get lost without a word.
  void no_grad(const char* arg, const Tensor& t) const {
    if (records_grad(t))
      throw std::runtime_error(std::string(op_) + ": " + arg +
                               " must not require grad, for there is no backward: call it under torch.no_grad() or "
                               "torch.inference_mode(), or on a detached tensor where no gradient is wanted");
  }

  // Kernels read and write in no order that a caller could rely on, so no buffer that one writes may share memory with
  // another argument. An input and a buffer of which one is reached only through a copy cannot collide, and are passed
  // over.
  void no_overlap(std::initializer_list<NamedTensor> inputs, const std::vector<NamedTensor>& outputs) const {
    std::array<Touched, 16> all;  // each asked once: pairs are many, and every question is a call
    size_t count = 0;
    auto add = [&](const NamedTensor& t) {
      if (t.second != nullptr && t.second->numel() != 0) all[count++] = Touched(t);
    };
    if (inputs.size() + outputs.size() > all.size()) throw std::logic_error("more tensors than no_overlap holds");
    for (const NamedTensor& t : inputs) add(t);
    const size_t first_output = count;
    for (const NamedTensor& t : outputs) add(t);
    for (size_t i = first_output; i < count; ++i)
      for (size_t j = 0; j < i; ++j) {
        const bool both_written = j >= first_output, in_place = all[i].contiguous && all[j].in_rows;
        if ((both_written || in_place) && all[i].overlaps(all[j]))
          fail(all[i].name, std::string("not share memory with ") + all[j].name, "buffers that overlap");
      }
  }

 private:
  // The memory of a tensor of at most two dimensions: blocks x pieces, each `width` bytes without a gap.
  struct Touched {
    struct Level {
      int64_t count = 1, step = 0;
    };
    const char* name = nullptr;
    int64_t begin = 0, end = 0, width = 0;
    Level blocks, pieces;
    bool contiguous = false, in_rows = false;  // written in place; read in place, perhaps

    Touched() = default;
    explicit Touched(const NamedTensor& named) : name(named.first) {
      const Tensor& t = *named.second;
      const auto size = static_cast<int64_t>(t.element_size());
      begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data_ptr()));
      width = size;
      contiguous = in_rows = t.is_contiguous();
      if (contiguous) {
        width *= t.numel();
        end = begin + width;
        return;
      }
      const int64_t dim = t.dim();
      in_rows = dim == 2 && (t.size(1) == 1 || t.stride(1) == 1);
      for (int64_t d = dim - 1; d >= 0; --d) {
        const Level level{t.stride(d) == 0 ? 1 : t.size(d), t.stride(d) * size};
        if (level.count == 1) continue;
        if (d == dim - 1 && level.step == size) width *= level.count;
        else if (pieces.count == 1) pieces = level;
        else blocks = level;
      }
      end = begin + (blocks.count - 1) * blocks.step + (pieces.count - 1) * pieces.step + width;
    }

    // Whether bytes from `low` to `high` hold one of the pieces of the block that begins at `start`.
    bool meets(int64_t start, int64_t low, int64_t high) const {
      const int64_t gap = low - start - width;  // the first piece that ends behind `low` meets them, or none does
      const int64_t i = gap < 0 || pieces.step == 0 ? 0 : gap / pieces.step + 1;
      const int64_t piece = start + i * pieces.step;
      return i < pieces.count && piece < high && low < piece + width;
    }

    bool overlaps(const Touched& other) const {
      if (end <= other.begin || other.end <= begin) return false;
      for (int64_t b = 0; b < blocks.count; ++b)
        for (int64_t p = 0; p < pieces.count; ++p) {
          const int64_t low = begin + b * blocks.step + p * pieces.step;
          for (int64_t k = 0; k < other.blocks.count; ++k)
            if (other.meets(other.begin + k * other.blocks.step, low, low + width)) return true;
        }
      return false;
    }
  };

  const char* op_;
};

}  // namespace mxfp4
