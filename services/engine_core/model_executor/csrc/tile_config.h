// How the tile unit is told the sizes of its tiles, and what the compiler is told of the unit.
#pragma once

#include <stdint.h>

#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace {

// All of 16 rows of 64 bytes, unless changed.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// GCC's intrinsics do not say that they read memory: what was stored before a load of tiles must be there.
inline void finish_stores() { asm volatile("" ::: "memory"); }

inline void configure_tiles(const TileConfig& config) {
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

}  // namespace
#endif
