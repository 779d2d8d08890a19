// The table of kernels for one instruction set: compiled once for each, with its flags, and with STEPWIRE_TABLE as the
// function of kernels.h that hands the table out.

#include "decode.h"
#include "few_rows.h"
#include "int8.h"
#include "prefill.h"
#include "rows.h"

namespace {

// T is what the cache holds, Steps and Product how it is decoded and prefilled.
template <typename Steps, typename Product, typename T, auto multiply_int8 = multiply_int8<T>>
struct Set {
  // A tile takes as long for one head as for 16: up to 4 heads vectors are faster. And it wants whole rows of 32 numbers.
  static bool is_plain(const Attention& a) { return a.group() <= 4 || a.head_dim % 32 != 0; }

  static int64_t scratch_size(const Attention& a) {
    const int64_t steps = is_plain(a) ? VectorSteps<T>::size(a) : Steps::size(a);
    return larger(DecodeState::size(a) + steps, Prefill<Product, T>::size(a));
  }

  static void decode(const Attention& a, const DecodePart* parts, int64_t num_parts, char* scratch) {
    if (is_plain(a))
      decode_with<VectorSteps<T>>(a, parts, num_parts, scratch);
    else
      decode_with<Steps>(a, parts, num_parts, scratch);
  }

  static int64_t partial_size(const Attention& a) { return a.group() * (DecodeState::padded_features(a) + 2); }

  static void prefill(const Attention& a, const PrefillTile& tile, char* scratch) {
    Prefill<Product, T>(a, tile, scratch).run();
  }

  static const stepwire::Kernels* table() {
    static const stepwire::Kernels kernels = {
        sizeof(T), look_up<T>, add_rms_norm<T>, rope_and_cache<T>, act_mul<T>, scratch_size, decode, partial_size,
        merge<T>, prefill, tile_queries, FewRows<Product, T>::multiply, FewRows<Product, T>::kMost,
        FewRows<Product, T>::kMostOfLayers, quantize<T>, multiply_int8,
    };
    return &kernels;
  }
};

}  // namespace

namespace stepwire {

const Kernels* STEPWIRE_TABLE(bool is_bfloat16) {
#if defined(__AVX512BF16__)
  typedef DotProduct Product;
#else
  typedef FloatProduct Product;
#endif
  return is_bfloat16 ? Set<VectorSteps<bfloat16>, Product, bfloat16>::table()
                     : Set<VectorSteps<float>, FloatProduct, float>::table();
}

#if defined(__AMX_BF16__)
const Kernels* amx_kernels(bool is_bfloat16) {
  return is_bfloat16 ? Set<TileSteps, TileProduct, bfloat16, Int8Tiles<bfloat16>::multiply>::table()
                     : Set<VectorSteps<float>, FloatProduct, float, Int8Tiles<float>::multiply>::table();
}
#endif

}  // namespace stepwire
