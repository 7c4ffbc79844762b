// shuffle_rows: output[i] = input[dst2src_map[i]], a zero row where the map points outside the input.
#pragma once
#include "../args.h"
#include "checks.h"

namespace mxfp4 {

inline Checks check_shuffle_rows(const Tensor& input, const Tensor& dst2src_map) {
  Checks check("shuffle_rows");
  check.dims("input", input, 2, "[rows, width]");
  check.dtype("dst2src_map", dst2src_map, {aoti_torch_dtype_int32(), aoti_torch_dtype_int64()});
  check.dims("dst2src_map", dst2src_map, 1, "[output rows]");
  check.device("dst2src_map", dst2src_map, "input", input);
  return check;
}

template <typename Backend>
struct ShuffleRows {
  static void run(const Tensor& input, const Tensor& dst2src_map, const Tensor& output) {
    const int64_t element = static_cast<int64_t>(input.element_size());
    const Tensor rows = as_rows(input, element);
    const Tensor map = as_contiguous(dst2src_map);
    ShuffleArgs args;
    args.input = data<char>(rows);
    args.input_rows = rows.size(0);
    args.row_stride_bytes = rows.size(0) <= 1 ? rows.size(1) * element : rows.stride(0) * element;
    args.row_bytes = rows.size(1) * element;
    args.map = map.data_ptr();
    args.map_is_int64 = dtype_code(map) == aoti_torch_dtype_int64();
    args.rows = map.numel();
    args.output = mutable_data<char>(output);
    args.device = rows.get_device_index();
    if (args.rows > 0 && args.row_bytes > 0) Backend::shuffle_rows(args);
  }

  static Tensor functional(const Tensor& input, const Tensor& dst2src_map) {
    check_shuffle_rows(input, dst2src_map);
    Tensor output = empty({dst2src_map.size(0), input.size(1)}, dtype_code(input), input);
    run(input, dst2src_map, output);
    return output;
  }

  static void out(const Tensor& input, const Tensor& dst2src_map, const Tensor& output) {
    const Checks check = check_shuffle_rows(input, dst2src_map);
    check.buffer("output", output, dtype_code(input), {dst2src_map.size(0), input.size(1)}, "[output rows, width]",
                 "input", input);
    check.no_grad("input", input);
    check.no_grad("output", output);
    check.no_overlap({{"input", &input}, {"dst2src_map", &dst2src_map}}, {{"output", &output}});
    Written written(output, static_cast<int64_t>(input.element_size()), false);
    run(input, dst2src_map, written.tensor());
    written.commit();
  }
};

}  // namespace mxfp4
