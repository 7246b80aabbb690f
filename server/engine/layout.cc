#include "server/engine/layout.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "kernels/combine/exchange_mailbox.h"
#include "kernels/common/tile.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

/// Maximum number of shards of a CPU engine, each of which needs at least one thread.
constexpr int64_t kCpuShardsMax = 256;

/// GPUs are sorted by free memory in whole units of this size.
constexpr int64_t kFreeStepBytes = int64_t{1} << 30;

/// GPUs of one model differ in memory by at most 1 / kMemoryParts of the larger size.
constexpr int64_t kMemoryParts = 100;

struct Numbers {
  int32_t replicas = 0;  ///< 0 if not chosen yet.
  int32_t shards = 0;    ///< 0 if not chosen yet.
};

using GpuSpan = absl::Span<const GpuInfo>;
using NeedsOf = std::function<GpuNeeds(int32_t num_shards)>;

std::string CountText(int64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

/// Returns for example "4 replicas of 1 shard". Omits a number that is not chosen yet; at least one
/// must be known.
std::string Text(const Numbers& numbers) {
  return absl::StrCat(numbers.replicas == 0 ? "" : CountText(numbers.replicas, "replica"),
                      numbers.replicas == 0 || numbers.shards == 0 ? "" : " of ",
                      numbers.shards == 0 ? "" : CountText(numbers.shards, "shard"));
}

/// Returns a + b for non-negative numbers, limited to the largest int64_t.
int64_t Add(int64_t a, int64_t b) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return a > kMax - b ? kMax : a + b;
}

int64_t BytesOnce(const GpuNeeds& needs) { return Add(needs.weight_bytes, needs.workspace_bytes); }

int64_t BytesTwice(const GpuNeeds& needs) { return Add(needs.weight_bytes, BytesOnce(needs)); }

/// Returns the GPUs that `options` allows, in the order in which they are used.
absl::StatusOr<std::vector<GpuInfo>> AllowedGpus(const EngineOptions& options, GpuSpan gpus) {
  if (gpus.empty()) return absl::FailedPreconditionError("there is no GPU; use --device cpu");
  if (options.gpus.empty()) return std::vector<GpuInfo>(gpus.begin(), gpus.end());
  std::vector<GpuInfo> allowed;
  for (const int32_t ordinal : options.gpus) {
    const auto is_it = [ordinal](const GpuInfo& gpu) { return gpu.ordinal == ordinal; };
    const auto found = absl::c_find_if(gpus, is_it);
    if (found == gpus.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("GPU ", ordinal, " does not exist: GPUs are numbered from 0, and there ",
                       gpus.size() == 1 ? "is " : "are ", gpus.size()));
    }
    if (absl::c_any_of(allowed, is_it)) {
      return absl::InvalidArgumentError(absl::StrCat("GPU ", ordinal, " is named twice"));
    }
    allowed.push_back(*found);
  }
  return allowed;
}

std::string Describe(const GpuInfo& gpu) {
  return absl::StrCat("GPU ", gpu.ordinal, " (", gpu.name, ", compute capability ", gpu.major, ".",
                      gpu.minor, ", ", HumanBytes(gpu.total_bytes), ")");
}

bool IsSameModel(const GpuInfo& a, const GpuInfo& b) {
  const auto [less, more] = std::minmax(a.total_bytes, b.total_bytes);
  return a.name == b.name && a.major == b.major && a.minor == b.minor &&
         less >= more - more / kMemoryParts;
}

absl::Status CheckModels(GpuSpan gpus) {
  for (const GpuInfo& gpu : gpus) {
    if (gpu.major < 8) {
      return absl::FailedPreconditionError(
          absl::StrCat(Describe(gpu), " is too old: compute capability 8.0 or later is required; ",
                       "choose other GPUs with --gpus or use --device cpu"));
    }
    if (!IsSameModel(gpus.front(), gpu)) {
      return absl::FailedPreconditionError(
          absl::StrCat(Describe(gpus.front()), " and ", Describe(gpu),
                       " differ, but results are bit-identical only on GPUs of the same model; "
                       "choose GPUs of one model with --gpus"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers(const Numbers& requested, int64_t vocab_size) {
  if (requested.replicas < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("there cannot be ", requested.replicas, " replicas"));
  }
  return requested.shards == 0 ? absl::OkStatus()
                               : PartitionTiles(vocab_size, requested.shards).status();
}

/// Builds the layout for `numbers`, which must be chosen. `device_of` returns the device of the
/// shard with a given index, counted over all replicas.
absl::StatusOr<Layout> LayoutOf(const Numbers& numbers, std::string reason, int64_t vocab_size,
                                const std::function<std::string(size_t index)>& device_of) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<TileRange> ranges,
                            PartitionTiles(vocab_size, numbers.shards));
  Layout layout{numbers.replicas, numbers.shards, std::move(reason), {}};
  for (int32_t replica = 0; replica < numbers.replicas; ++replica) {
    for (int32_t shard = 0; shard < numbers.shards; ++shard) {
      const TileRange& tiles = ranges[static_cast<size_t>(shard)];
      layout.places.push_back({replica, shard, device_of(layout.places.size()),
                               tiles.begin * kernels::kTileColumns,
                               std::min(tiles.end * kernels::kTileColumns, vocab_size)});
    }
  }
  return layout;
}

/// Chooses the numbers of replicas and shards for a set of GPUs.
class GpuPlanner {
 public:
  /// `gpus` are in the order in which they are used. If the user named them (`are_named`), all of
  /// them must be used.
  GpuPlanner(const Numbers& requested, bool are_named, int64_t vocab_size,
             std::vector<GpuInfo> gpus, const NeedsOf& needs_of)
      : requested_(requested),
        are_named_(are_named),
        vocab_size_(vocab_size),
        gpus_(std::move(gpus)),
        needs_of_(needs_of) {
    if (are_named_) return;
    // GPUs that other processes use come last.
    absl::c_stable_sort(gpus_, [](const GpuInfo& a, const GpuInfo& b) {
      return a.free_bytes / kFreeStepBytes > b.free_bytes / kFreeStepBytes;
    });
  }

  absl::StatusOr<Layout> Plan() const {
    const std::vector<Numbers> possible = Possible(requested_);
    if (possible.empty()) return NothingPossible();
    const bool is_fixed = requested_.replicas > 0 && requested_.shards > 0;
    LOGPROBD_RETURN_IF_ERROR(CheckModels(is_fixed ? Used(requested_) : GpuSpan(gpus_)));
    const Numbers* chosen = FirstThatFits(possible, BytesTwice);
    const bool fits_twice = chosen != nullptr;
    if (!fits_twice) chosen = FirstThatFits(possible, BytesOnce);
    if (chosen == nullptr) return NoRoom(possible.back());
    const bool is_forced =
        requested_.shards > 0 || (requested_.replicas > 0 && possible.size() == 1);
    std::string reason = absl::StrCat(is_forced ? RequestedText() : FitText(*chosen, fits_twice),
                                      ": ", Text(*chosen));
    if (!is_fixed) absl::StrAppend(&reason, UnusedText(*chosen));
    const std::vector<int32_t> ordinals = Ordinals(Used(*chosen));
    return LayoutOf(*chosen, std::move(reason), vocab_size_,
                    [&](size_t index) { return GpuName(ordinals[index]); });
  }

 private:
  /// Returns every pair of numbers that agrees with `requested`, by ascending number of shards and
  /// then by descending number of replicas.
  std::vector<Numbers> Possible(const Numbers& requested) const {
    const auto num_gpus = static_cast<int64_t>(gpus_.size());
    const int64_t shards_max =
        std::min({num_gpus, kernels::NumTiles(vocab_size_), int64_t{kernels::kExchangeRanksMax}});
    std::vector<Numbers> possible;
    for (int64_t shards = 1; shards <= shards_max; ++shards) {
      if (requested.shards > 0 && requested.shards != shards) continue;
      for (int64_t replicas = num_gpus / shards; replicas >= 1; --replicas) {
        if (requested.replicas > 0 && requested.replicas != replicas) continue;
        if (are_named_ && replicas * shards != num_gpus) continue;
        possible.push_back({static_cast<int32_t>(replicas), static_cast<int32_t>(shards)});
      }
    }
    return possible;
  }

  absl::Status NothingPossible() const {
    const auto num_gpus = static_cast<int64_t>(gpus_.size());
    const int64_t needed =
        std::max<int64_t>(requested_.replicas, 1) * std::max(requested_.shards, 1);
    const std::string given =
        are_named_ ? absl::StrCat("--gpus names ", num_gpus)
                   : absl::StrCat("there ", num_gpus == 1 ? "is " : "are ", num_gpus);
    if (needed > num_gpus) {
      return absl::FailedPreconditionError(
          absl::StrCat(Text(requested_), " need ", CountText(needed, "GPU"), ", but ", given));
    }
    return absl::InvalidArgumentError(absl::StrCat(
        Text(requested_), " would leave GPUs unused: ", given, ", so replicas x shards must be ",
        absl::StrJoin(Possible({}), " or ", [](std::string* out, const Numbers& fit) {
          absl::StrAppend(out, fit.replicas, " x ", fit.shards);
        })));
  }

  GpuSpan Used(const Numbers& numbers) const {
    return GpuSpan(gpus_).first(static_cast<size_t>(numbers.replicas) *
                                static_cast<size_t>(numbers.shards));
  }

  /// Returns the ordinals in the order in which the GPUs hold shards: in the order in which the
  /// user named them, otherwise ascending.
  std::vector<int32_t> Ordinals(GpuSpan gpus) const {
    std::vector<int32_t> ordinals;
    for (const GpuInfo& gpu : gpus) ordinals.push_back(gpu.ordinal);
    if (!are_named_) absl::c_sort(ordinals);
    return ordinals;
  }

  /// Returns the GPU with the least free memory among those that are used.
  const GpuInfo& Fullest(const Numbers& numbers) const {
    const GpuSpan used = Used(numbers);
    return *absl::c_min_element(
        used, [](const GpuInfo& a, const GpuInfo& b) { return a.free_bytes < b.free_bytes; });
  }

  /// Returns the first numbers for which every used GPU has enough free memory, or null if there
  /// are none.
  const Numbers* FirstThatFits(const std::vector<Numbers>& possible,
                               int64_t (*bytes_of)(const GpuNeeds&)) const {
    const auto found = absl::c_find_if(possible, [&](const Numbers& numbers) {
      return bytes_of(needs_of_(numbers.shards)) <= Fullest(numbers).free_bytes;
    });
    return found == possible.end() ? nullptr : &*found;
  }

  absl::Status NoRoom(const Numbers& numbers) const {
    const GpuNeeds needs = needs_of_(numbers.shards);
    const GpuInfo& gpu = Fullest(numbers);
    return absl::FailedPreconditionError(absl::StrCat(
        "GPU ", gpu.ordinal, " has ", HumanBytes(gpu.free_bytes), " free",
        gpu.reserved_bytes <= 0 ? ""
                                : absl::StrCat(" after ", HumanBytes(gpu.reserved_bytes),
                                               " for the heads before this one"),
        ", but ",
        numbers.shards == 1 ? "the head" : absl::StrCat("each of ", numbers.shards, " shards"),
        " needs ", HumanBytes(BytesOnce(needs)), " (weight ", HumanBytes(needs.weight_bytes),
        ", workspace ", HumanBytes(needs.workspace_bytes), "): ", Advice()));
  }

  /// Suggests the smallest number of shards that would fit, with the requested number of replicas
  /// if possible, otherwise with one.
  std::string Advice() const {
    for (const int32_t replicas : {requested_.replicas, are_named_ ? 0 : 1}) {
      const std::vector<Numbers> possible = Possible({replicas, 0});
      const Numbers* const fit = FirstThatFits(possible, BytesOnce);
      if (fit != nullptr) {
        return absl::StrCat("--shards ", fit->shards, " --replicas ", fit->replicas, " would fit");
      }
    }
    return "no number of shards would fit; free memory on this GPU, choose other GPUs with --gpus, "
           "or lower --batch-rows";
  }

  std::string RequestedText() const {
    if (requested_.replicas == 0) return "shards as requested";
    return requested_.shards == 0 ? "replicas as requested" : "replicas and shards as requested";
  }

  std::string FitText(const Numbers& chosen, bool fits_twice) const {
    const std::string fit =
        !fits_twice ? absl::StrCat("fits once, not twice, on ", CountText(chosen.shards, "GPU"))
        : chosen.shards == 1 ? "fits twice on each GPU"
                             : "does not fit twice on one GPU";
    return absl::StrCat("head of ", HumanBytes(needs_of_(1).weight_bytes), " ", fit, " (",
                        HumanBytes(Fullest(chosen).free_bytes), " free)");
  }

  std::string UnusedText(const Numbers& chosen) const {
    const GpuSpan unused = GpuSpan(gpus_).subspan(Used(chosen).size());
    if (unused.empty()) return "";
    return absl::StrCat("; not used: gpu", absl::StrJoin(Ordinals(unused), ", gpu"));
  }

  const Numbers requested_;
  const bool are_named_;
  const int64_t vocab_size_;
  std::vector<GpuInfo> gpus_;
  const NeedsOf& needs_of_;
};

}  // namespace

absl::StatusOr<std::vector<TileRange>> PartitionTiles(int64_t vocab_size, int32_t num_shards) {
  const int64_t num_tiles = kernels::NumTiles(vocab_size);
  if (num_shards < 1 || num_shards > num_tiles) {
    return absl::InvalidArgumentError(
        absl::StrCat(num_shards, " shards cannot share a vocabulary of ", vocab_size, ": it has ",
                     num_tiles, num_tiles == 1 ? " tile" : " tiles", " of ", kernels::kTileColumns,
                     " columns, so at most ", num_tiles, num_tiles == 1 ? " shard" : " shards"));
  }
  std::vector<TileRange> ranges;
  int64_t begin = 0;
  for (int64_t shard = 0; shard < num_shards; ++shard) {
    const int64_t size = num_tiles / num_shards + (shard < num_tiles % num_shards ? 1 : 0);
    ranges.push_back({begin, begin + size});
    begin += size;
  }
  return ranges;
}

void Reserve(const MemoryPlan& reserved, std::vector<GpuInfo>& gpus) {
  for (GpuInfo& gpu : gpus) {
    for (const MemoryUse& use : reserved) {
      if (use.place == GpuName(gpu.ordinal)) gpu.reserved_bytes += use.bytes;
    }
    gpu.free_bytes = std::max<int64_t>(gpu.free_bytes - gpu.reserved_bytes, 0);
  }
}

absl::StatusOr<Layout> PlanGpuLayout(const HeadInfo& head, const EngineOptions& options,
                                     absl::Span<const GpuInfo> gpus,
                                     const std::function<GpuNeeds(int32_t num_shards)>& needs_of) {
  const Numbers requested{options.replicas, options.shards};
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<GpuInfo> allowed, AllowedGpus(options, gpus));
  LOGPROBD_RETURN_IF_ERROR(CheckNumbers(requested, head.vocab_size));
  if (requested.shards > kernels::kExchangeRanksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(requested.shards, " shards are too many: at most ", kernels::kExchangeRanksMax,
                     " GPUs share one head"));
  }
  return GpuPlanner(requested, !options.gpus.empty(), head.vocab_size, std::move(allowed), needs_of)
      .Plan();
}

absl::StatusOr<Layout> PlanCpuLayout(const HeadInfo& head, const EngineOptions& options) {
  const Numbers requested{options.replicas, options.shards};
  LOGPROBD_RETURN_IF_ERROR(CheckNumbers(requested, head.vocab_size));
  const Numbers numbers{std::max(requested.replicas, 1), std::max(requested.shards, 1)};
  if (int64_t{numbers.replicas} * numbers.shards > kCpuShardsMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        Text(numbers), " are too many on a CPU: ", "replicas x shards must be at most ",
        kCpuShardsMax));
  }
  const bool is_requested = requested.replicas > 0 || requested.shards > 0;
  return LayoutOf(numbers,
                  absl::StrCat(Text(numbers), is_requested ? " as requested" : " by default"),
                  head.vocab_size, [](size_t) { return std::string("cpu"); });
}

}  // namespace logprobd
