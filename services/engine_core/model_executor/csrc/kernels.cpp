// The table of kernels for one instruction set: compiled once for each, with its flags, and with STEPWIRE_TABLE as the
// function of kernels.h that hands the table out.

#include "decode.h"
#include "prefill.h"
#include "rows.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AMX_BF16__)
// The kernel of the operating system hands out the large state of the tile unit only to those who ask.
bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-tile") &&
                              syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif

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
  };
  return &kernels;
}

}  // namespace

namespace stepwire {

const Kernels* STEPWIRE_TABLE(bool is_bfloat16) {
  if (!is_bfloat16) return table<FloatProduct, float>();
#if defined(__AMX_BF16__)
  if (has_tiles()) return table<TileProduct, bfloat16>();
#endif
#if defined(__AVX512BF16__)
  return table<DotProduct, bfloat16>();
#else
  return table<FloatProduct, bfloat16>();
#endif
}

}  // namespace stepwire
