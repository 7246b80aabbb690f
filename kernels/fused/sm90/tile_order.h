#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// A grid of `num_lines` lines with `line_size` tiles each, which is processed in groups of up to
/// `group_lines_max` neighbouring lines. All are >= 1, and the grid has less than 2^31 tiles.
struct TileGrid {
  uint32_t num_lines;
  uint32_t line_size;
  uint32_t group_lines_max;
};

struct TilePosition {
  uint32_t line;
  uint32_t in_line;  ///< Position in the line.
};

/// Returns the tile that is processed as the one number `index`, from 0 to num_lines * line_size
/// - 1. A group's tiles alternate between its lines, so the tiles that run at the same time are a
/// block of the grid, which shares operands. The sizes of groups differ by at most one line. Every
/// second group goes backwards, so that it starts with operands that the second-level cache holds.
LOGPROBD_HOST_DEVICE constexpr TilePosition TileAt(uint32_t index, const TileGrid& grid) {
  // Group g has the lines from g * num_lines / num_groups on, rounded down.
  const uint32_t num_groups = (grid.num_lines + grid.group_lines_max - 1) / grid.group_lines_max;
  const uint32_t group = ((index / grid.line_size + 1) * num_groups - 1) / grid.num_lines;
  const uint32_t first_line = group * grid.num_lines / num_groups;
  const uint32_t group_lines = (group + 1) * grid.num_lines / num_groups - first_line;
  const uint32_t in_group = index - first_line * grid.line_size;
  const uint32_t in_line = in_group / group_lines;
  return {first_line + in_group - in_line * group_lines,
          group % 2 == 0 ? in_line : grid.line_size - 1 - in_line};
}

}  // namespace logprobd::kernels
