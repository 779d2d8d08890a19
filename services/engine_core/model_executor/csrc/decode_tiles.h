// The steps of decoding with the tile unit: 16 keys at a time meet all heads of a group at once, and 32 values likewise.
#pragma once

#include "decode_vectors.h"
#include "tile_config.h"

#if defined(__AMX_BF16__)
namespace {

// For heads of a multiple of 32 numbers. Keys that do not fill a tile are left to vectors.
struct TileSteps : VectorSteps<bfloat16> {
  typedef VectorSteps<bfloat16> Vectors;
  static constexpr int64_t kPadding = 32;
  static constexpr bool kHeadsTogether = false;
  // Heads of one tile, and features whose sums are held at a time.
  static constexpr int64_t kHeads = 16, kFeatures = 32;

  bfloat16* weights;     // [rows of a group][kDecodeKeys]
  float* query_tiles;    // [rows of a group / kHeads][head_dim / 32][16][slots], pairs of numbers
  float* products;       // [16][16]
  float* packed_values;  // [2][16][kFeatures], pairs of keys
  // Columns of a tile of products that one set of 16 keys takes: heads, rounded up to a power of two.
  int64_t columns = 1;

  static int64_t own_size(const Attention& a) {
    const int64_t rows = DecodeState::rows_of_group(a);
    return round_up(rows * kDecodeKeys * sizeof(bfloat16), 64) +
           (round_up(rows, kHeads) * a.head_dim / 2 + 256 + 32 * kFeatures) * sizeof(float);
  }

  static int64_t size(const Attention& a) { return Vectors::size(a) + own_size(a); }

  TileSteps(const Attention& a, const DecodeState& s, char* memory) : Vectors(a, s, memory) {
    while (columns < a.group() && columns < kHeads) columns *= 2;
    memory += Vectors::size(a);
    memset(memory, 0, own_size(a));
    weights = (bfloat16*)memory;
    products = (float*)(memory + round_up(DecodeState::rows_of_group(a) * kDecodeKeys * sizeof(bfloat16), 64));
    packed_values = products + 256;
    query_tiles = packed_values + 32 * kFeatures;
    configure();
  }

  ~TileSteps() { _tile_release(); }

  // Tiles: 0 and 1 products, 2 queries, 3 keys, 4 values, 5 weights, 6 and 7 sums.
  void configure() const {
    TileConfig config;
    for (int tile = 0; tile < 3; tile++) config.row_bytes[tile] = columns * sizeof(float);
    for (int tile = 5; tile < 8; tile++) config.rows[tile] = smaller(a.group(), kHeads);
    configure_tiles(config);
  }

  float* tiles_of(int64_t head) const { return query_tiles + head / kHeads * (a.head_dim / 2 * columns); }

  void begin(const bfloat16* query, int64_t) {
    Vectors::begin(query, 1);
    for (int64_t g = 0; g < a.group(); g++)
      for (int64_t d = 0; d < a.head_dim / 2; d++)
        memcpy(tiles_of(g) + d * columns + g % kHeads, query + g * a.head_dim + 2 * d, sizeof(float));
  }

  void score(const Tile& tile, const Tile*) {
    finish_stores();
    for (int64_t head = 0; head < a.group(); head += kHeads) score_heads(tile, head);
    for (const Run* run = tile.runs; run < tile.runs + tile.num_runs; run++) score_singly(*run, in_tiles(*run), 0);
  }

  // How many keys of a run are scored in sets of 16.
  int64_t in_tiles(const Run& run) const { return smaller(run.count, readable(run) / 16 * 16); }

  // Sets of 16 keys fill the columns of one tile of products side by side, which then is transposed as one.
  void score_heads(const Tile& tile, int64_t head) {
    const int64_t most = 16 / columns;
    const bfloat16* keys[16];
    int64_t num_sets = 0, sets[16];
    for (const Run* run = tile.runs; run < tile.runs + tile.num_runs; run++)
      for (int64_t i = 0; i < in_tiles(*run); i += 16) {
        keys[num_sets] = (const bfloat16*)a.keys + (run->row + i) * a.head_dim;
        sets[num_sets++] = run->first + i;
        if (num_sets == most) {
          score_sets(head, keys, sets, num_sets);
          num_sets = 0;
        }
      }
    if (num_sets > 0) score_sets(head, keys, sets, num_sets);
  }

  void score_sets(int64_t head, const bfloat16** keys, const int64_t* sets, int64_t num_sets) const {
    int64_t set = 0;
    for (; set + 2 <= num_sets; set += 2)
      multiply_keys(keys[set], keys[set + 1], tiles_of(head), products + set * columns);
    if (set < num_sets) multiply_keys(keys[set], keys[set], tiles_of(head), products + set * columns);
    spread_products(head, sets, num_sets);
  }

  // Two sets, so that one multiplies while the other loads. The second may be the first once more.
  void multiply_keys(const bfloat16* first, const bfloat16* second, const float* queries, float* to) const {
    const int64_t bytes = a.head_dim * sizeof(bfloat16);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      _tile_loadd(2, queries + d / 2 * columns, columns * sizeof(float));
      _tile_loadd(3, first + d, bytes);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(3, second + d, bytes);
      _tile_dpbf16ps(1, 3, 2);
    }
    _tile_stored(0, to, 16 * sizeof(float));
    if (second != first) _tile_stored(1, to + columns, 16 * sizeof(float));
  }

  void spread_products(int64_t head, const int64_t* sets, int64_t num_sets) const {
    Vec square[kWidth];
    for (int i = 0; i < kWidth; i++) square[i] = load(products + i * kWidth);
    transpose(square);
    for (int64_t set = 0; set < num_sets; set++)
      for (int64_t g = 0; g < smaller(columns, a.group() - head); g++)
        store(s.scores + (head + g) * kDecodeKeys + sets[set], square[set * columns + g]);
  }

  void add(const Tile& tile, const Tile* next) {
    const bfloat16* rows[kDecodeKeys];
    list_rows(a.values, tile, rows);
    for (int64_t head = 0; head < a.group(); head += kHeads)
      for (int64_t d = 0; d < a.head_dim; d += kFeatures, next = nullptr) add_features(rows, tile.count(), next, head, d);
  }

  void list_rows(const void* cache, const Tile& tile, const bfloat16** rows) const {
    for (const Run* run = tile.runs; run < tile.runs + tile.num_runs; run++)
      for (int64_t i = 0; i < run->count; i++)
        rows[run->first + i] = (const bfloat16*)cache + (run->row + i) * a.head_dim;
  }

  void add_features(const bfloat16** rows, int64_t count, const Tile* next, int64_t head, int64_t d) {
    const int64_t bytes = s.features * sizeof(float), packed_bytes = kFeatures * sizeof(float);
    float* sums = s.weighted + head * s.features + d;
    finish_stores();
    _tile_loadd(6, sums, bytes);
    _tile_loadd(7, sums + 16, bytes);
    const bfloat16* ahead[kDecodeKeys];
    if (next) list_rows(a.keys, *next, ahead);
    for (int64_t key = 0; key < count; key += 32) {
      float* const packed = packed_values + key % 64 / 32 * 16 * kFeatures;
      pack(packed, rows + key, smaller(32, count - key), d, ahead + key, next ? next->count() - key : 0);
      finish_stores();
      _tile_loadd(5, weights + head * kDecodeKeys + key, kDecodeKeys * sizeof(bfloat16));
      _tile_loadd(4, packed, packed_bytes);
      _tile_dpbf16ps(6, 5, 4);
      _tile_loadd(4, packed + 16, packed_bytes);
      _tile_dpbf16ps(7, 5, 4);
    }
    _tile_stored(6, sums, bytes);
    _tile_stored(7, sums + 16, bytes);
  }

  // A key and its value, which the next tile reads: a few at a time, as no more can be under way.
  void fetch(const bfloat16* key) const {
    const int64_t to_value = (const char*)a.values - (const char*)a.keys;
    for (int64_t d = 0; d < a.head_dim; d += 32) {
      __builtin_prefetch((const char*)(key + d));
      __builtin_prefetch((const char*)(key + d) + to_value, 0, 2);
    }
  }

  // packed[j] = 32 features of keys 2j and 2j + 1 side by side, in the order of pairs; zeros behind the last.
  void pack(float* packed, const bfloat16** rows, int64_t count, int64_t d, const bfloat16** ahead,
            int64_t num_ahead) const {
    for (int64_t j = 0; j < 16; j++) {
      if (2 * j < num_ahead) fetch(ahead[2 * j]);
      if (2 * j + 1 < num_ahead) fetch(ahead[2 * j + 1]);
      const Pair even = 2 * j < count ? load_pair(rows[2 * j] + d) : Pair{};
      const Pair odd = 2 * j + 1 < count ? load_pair(rows[2 * j + 1] + d) : Pair{};
      store(packed + j * kFeatures, (Vec)((UintVec)even.a >> 16 | (UintVec)odd.a));
      store(packed + j * kFeatures + 16, (Vec)((UintVec)even.b >> 16 | (UintVec)odd.b));
    }
  }
};

}  // namespace
#endif
