// The table of kernels for one instruction set: compiled once for each, with its flags, and with STEPWIRE_TABLE as the
// function of kernels.h that hands the table out.

#include "decode.h"
#include "few_rows.h"
#include "prefill.h"
#include "rows.h"

namespace {

template <typename Product, typename T>
void prefill(const Attention& attention, const PrefillTile& tile, char* scratch) {
  Prefill<Product, T>(attention, tile, scratch).run();
}

template <typename Product, typename T>
int64_t scratch_size(const Attention& attention) {
  return larger(DecodeScratch<T>::size(attention), Prefill<Product, T>::size(attention));
}

inline int64_t partial_size(const Attention& a) { return a.group() * (round_up(a.head_dim, 2 * kWidth) + 2); }

template <typename Product, typename T>
const stepwire::Kernels* table() {
  static const stepwire::Kernels kernels = {
      add_rms_norm<T>, rope_and_cache<T>, act_mul<T>,          scratch_size<Product, T>,
      decode<T>,       partial_size,      merge<T>,            prefill<Product, T>, tile_queries,
      FewRows<Product, T>::multiply,      FewRows<Product, T>::kRows,
  };
  return &kernels;
}

}  // namespace

namespace stepwire {

const Kernels* STEPWIRE_TABLE(bool is_bfloat16) {
#if defined(__AVX512BF16__)
  return is_bfloat16 ? table<DotProduct, bfloat16>() : table<FloatProduct, float>();
#else
  return is_bfloat16 ? table<FloatProduct, bfloat16>() : table<FloatProduct, float>();
#endif
}

#if defined(__AMX_BF16__)
const Kernels* amx_kernels(bool is_bfloat16) {
  return is_bfloat16 ? table<TileProduct, bfloat16>() : table<FloatProduct, float>();
}
#endif

}  // namespace stepwire
