// Run by the build: prints the silu of the bfloat16 gates from kSiluLeast to kSiluMost, and then of their negatives, as
// the bits of floats, by the function that kernels without a table call. Checks the factors of all other gates.
#include <cstdio>

#include "../numerics.h"

int main() {
  using namespace mxfp4;
  for (uint32_t sign = 0; sign < 2; ++sign) {
    for (uint32_t magnitude = 0; magnitude < 0x8000; ++magnitude) {
      const float gate = BFloat16::to_float(static_cast<uint16_t>(sign << 15 | magnitude)), exact = silu<true>(gate);
      if (magnitude >= kSiluLeast && magnitude <= kSiluMost) {
        std::printf("0x%08x,\n", float_to_bits(exact));
        continue;
      }
      const float product = gate * silu_factor(magnitude, sign != 0);
      const bool both_nan = exact != exact && product != product;
      if (!both_nan && float_to_bits(exact) != float_to_bits(product)) {
        std::fprintf(stderr, "silu(%g) is %g, not %g\n", gate, exact, product);
        return 1;
      }
    }
  }
  return 0;
}
