#include "kernels/fused/choice.h"

#include <algorithm>
#include <cstddef>

namespace logprobd::kernels {
namespace {

/// Smallest depth at which the exposed epilogue of k256Cooperative costs less than the operand
/// traffic of smaller tiles.
constexpr int64_t kCooperativeDepthMin = 4'608;
/// Smallest depth at which the order along the vocabulary has more hits in the second-level cache.
constexpr int64_t kAlongVocabDepthMin = 3'584;
/// Largest depth at which the weight tiles of twice as many columns fit into the second-level
/// cache.
constexpr int64_t kWideDepthMax = 1'280;
/// Largest number of rows for which the order along the rows is faster at any depth.
constexpr int64_t kFewRowsMax = 1'024;
/// Largest number of rows for which swapped tiles were measured to be fastest. With more rows, the
/// empty rows of other tiles weigh less than the hidden rows that swapped tiles read again.
constexpr int64_t kSwappedRowsMax = 4'608;

/// Row steps up to kFewRowsMax and beyond, whose multiples leave few rows of the last cluster
/// empty.
constexpr int64_t kFineStep = 64;
constexpr int64_t kCoarseStep = 128;

/// Number of blocks that run at once, just below the number of multiprocessors of a GPU.
constexpr int64_t kBlocksAtOnce = 128;
/// Number of pairs of blocks that run at once on the 132 multiprocessors of an H100 or H200.
constexpr int64_t kPairsAtOnce = 66;

/// Time of a row of a block tile: `rate` per unit of depth plus `overhead`, in units of the time
/// that k128PingPong takes per row and unit of depth; `last` is added once per launch, because the
/// epilogue of a block's last tile overlaps nothing; gradients fit better without it. Fitted to
/// times of an H200 (tests/bench/FUSED.md). Of equal tiles the first one is faster where a launch
/// has few rows.
struct TileCost {
  FusedTile tile;
  double rate;
  double overhead;
  double last;
};
constexpr TileCost kPartialsCosts[] = {
    {FusedTile::k64Pair, 1.05, 110, 1'800},    {FusedTile::k128PingPong, 1.0, 0, 1'800},
    {FusedTile::k128Columns, 1.0, 0, 1'800},   {FusedTile::kSwapped80, 0.91, 435, 1'800},
    {FusedTile::kSwapped96, 0.92, 400, 1'800}, {FusedTile::kSwapped112, 0.915, 283, 1'800}};
/// The cost for more than kFewRowsMax rows and a depth of at least kCooperativeDepthMin.
constexpr TileCost kCooperativeCost = {FusedTile::k256Cooperative, 0.955, 165, 1'800};
constexpr TileCost kCachingCosts[] = {{FusedTile::k128PingPong, 1.0, 0, 1'800},
                                      {FusedTile::k128Columns, 1.0, 0, 1'800},
                                      {FusedTile::kSwapped80, 0.91, 720, 1'800},
                                      {FusedTile::kSwapped96, 0.905, 515, 1'800}};
constexpr TileCost kGradientCosts[] = {{FusedTile::k64Pair, 1.12, 0, 0},
                                       {FusedTile::k128PingPong, 1.0, 0, 0},
                                       {FusedTile::k128Columns, 1.0, 0, 0},
                                       {FusedTile::kSwapped80, 0.91, 1'000, 0},
                                       {FusedTile::kSwapped96, 0.905, 600, 0}};
/// The costs for more than kSwappedRowsMax rows.
constexpr TileCost kManyRowsCosts[] = {{FusedTile::k128PingPong, 1.0, 0, 0},
                                       {FusedTile::k128Columns, 1.0, 0, 0}};

/// Size of hidden rows, in elements, beyond which swapped tiles, which read all of them for each
/// column tile, miss the second-level cache, and the factor of their time then.
constexpr int64_t kCachedHiddenElements = int64_t{9} << 20;
constexpr double kUncachedFactor = 1.12;

/// Returns the time of a launch with pairs of blocks, in the units of TileCost. The rows of a
/// partly filled pair and the pairs of a partly filled wave take as long as others.
constexpr double CostOf(const FusedShape& shape, const TileCost& cost) {
  const auto groups = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const int64_t clusters = groups(shape.num_rows, ClusterRows(cost.tile)) *
                           groups(shape.num_tiles, ClusterColumnTiles(cost.tile));
  const int64_t waves = groups(clusters, kPairsAtOnce);
  const bool is_cached =
      !IsSwapped(cost.tile) || shape.num_rows * shape.depth <= kCachedHiddenElements;
  const double per_wave = (is_cached ? 1.0 : kUncachedFactor) *
                          (cost.rate * static_cast<double>(shape.depth) + cost.overhead);
  return static_cast<double>(TileRows(cost.tile)) *
         (static_cast<double>(waves) * per_wave + cost.last);
}

/// Returns the lowest cost of a tile, the first one among equals.
template <size_t kCount>
const TileCost& Cheapest(const FusedShape& shape, const TileCost (&costs)[kCount]) {
  return *std::min_element(costs, costs + kCount, [&](const TileCost& a, const TileCost& b) {
    return CostOf(shape, a) < CostOf(shape, b);
  });
}

/// Returns true when there are so few tiles that even the smallest blocks do not fill the GPU.
/// Blocks that share nothing then finish first.
bool FitsAtOnce(const FusedShape& shape) {
  constexpr int64_t kBlockRows = TileRows(FusedTile::k64PingPong);
  return (shape.num_rows + kBlockRows - 1) / kBlockRows * shape.num_tiles <= kBlocksAtOnce;
}

/// Returns a tile of 128 rows and its fastest order. The swizzle of k128Columns is that of
/// k128PingPong in rows and columns: its clusters have half the rows and twice the columns.
FusedChoice OrderOf(FusedTile tile, const FusedShape& shape) {
  const bool has_columns = tile == FusedTile::k128Columns;
  if (shape.num_rows <= kFewRowsMax || shape.depth < kAlongVocabDepthMin) {
    const int32_t columns = shape.depth <= kWideDepthMax ? 8 : 4;
    return {tile, FusedRaster::kAlongRows, has_columns ? columns / 2 : columns};
  }
  return {tile, FusedRaster::kAlongVocab, has_columns ? 16 : 8};
}

/// Returns the cheapest tile and its order.
template <size_t kCount>
FusedChoice ChooseCheapest(const FusedShape& shape, const TileCost (&costs)[kCount]) {
  const FusedTile tile = Cheapest(shape, costs).tile;
  const bool has_order = tile == FusedTile::k128PingPong || tile == FusedTile::k128Columns;
  return has_order ? OrderOf(tile, shape) : FusedChoice{tile, FusedRaster::kAlongRows, 1};
}

}  // namespace

FusedChoice ChooseFused(const FusedShape& shape) {
  if (shape.num_rows <= ClusterRows(FusedTile::k64PingPong) || FitsAtOnce(shape)) {
    return {FusedTile::k64PingPong, FusedRaster::kAlongRows, 1};
  }
  // Up to 128 rows, a pair takes as long as reading the weight.
  if (shape.num_rows <= ClusterRows(FusedTile::k64Pair)) {
    return {FusedTile::k64Pair, FusedRaster::kAlongRows, 1};
  }
  const bool may_cooperate = shape.num_rows > kFewRowsMax && shape.depth >= kCooperativeDepthMin;
  if (may_cooperate &&
      (shape.num_rows > kSwappedRowsMax ||
       CostOf(shape, kCooperativeCost) < CostOf(shape, Cheapest(shape, kPartialsCosts)))) {
    return {kCooperativeCost.tile, FusedRaster::kAlongVocab, 4};
  }
  return shape.num_rows <= kSwappedRowsMax ? ChooseCheapest(shape, kPartialsCosts)
                                           : ChooseCheapest(shape, kManyRowsCosts);
}

FusedChoice ChooseMma(int64_t num_rows) {
  // kMma64 reads 1.6 times as many bytes per product; a tenth more time is an estimate.
  constexpr double kSmallTileCost = 1.1;
  const auto rows_of = [&](FusedTile tile) {
    const int64_t tiles = (num_rows + TileRows(tile) - 1) / TileRows(tile);
    return static_cast<double>(tiles * TileRows(tile));
  };
  const bool is_small = kSmallTileCost * rows_of(FusedTile::kMma64) < rows_of(FusedTile::kMma128);
  return {is_small ? FusedTile::kMma64 : FusedTile::kMma128, FusedRaster::kAlongRows, 1};
}

FusedChoice ChooseFor(FusedArch arch, const FusedShape& shape) {
  return arch == FusedArch::kSm90 ? ChooseFused(shape) : ChooseMma(shape.num_rows);
}

FusedChoice ChooseCaching(const FusedShape& shape) {
  return shape.num_rows <= kSwappedRowsMax ? ChooseCheapest(shape, kCachingCosts)
                                           : ChooseCheapest(shape, kManyRowsCosts);
}

FusedChoice ChooseGradient(const FusedShape& shape) {
  if (shape.num_rows <= ClusterRows(FusedTile::k64Pair)) {
    return {FusedTile::k64Pair, FusedRaster::kAlongRows, 1};
  }
  return shape.num_rows <= kSwappedRowsMax ? ChooseCheapest(shape, kGradientCosts)
                                           : ChooseCheapest(shape, kManyRowsCosts);
}

int64_t FusedRowStep(const FusedShape& shape) {
  const FusedChoice choice = ChooseFused(shape);
  if (choice.tile == FusedTile::k64PingPong) return TileRows(choice.tile);
  if (shape.num_rows <= ClusterRows(FusedTile::k64Pair)) return ClusterRows(FusedTile::k64Pair);
  if (shape.num_rows <= kFewRowsMax) return kFineStep;
  const bool cooperates =
      choice.tile == FusedTile::k256Cooperative && shape.num_rows > kSwappedRowsMax;
  return cooperates ? ClusterRows(choice.tile) : kCoarseStep;
}

int64_t RowStepFor(FusedArch arch, const FusedShape& shape) {
  return arch == FusedArch::kSm90 ? FusedRowStep(shape) : TileRows(ChooseMma(shape.num_rows).tile);
}

}  // namespace logprobd::kernels
