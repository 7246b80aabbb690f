// A C++ program loads the library and calls the operator by its name. The Python tests in this
// folder test the results.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "gtest/gtest.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
/// logprob, entropy and lse, and eleven other results.
using Scores =
    decltype(std::tuple_cat(Three(), Three(), Three(), Three(), std::tuple<Tensor, Tensor>()));
using LinearLogprob = Scores(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                             const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                             const MaybeTensor&, double, double, double, int64_t, int64_t, int64_t,
                             std::string_view, bool, bool, bool, bool, bool, bool, bool, bool, bool,
                             bool, int64_t, int64_t, int64_t, bool, int64_t, bool,
                             const MaybeTensor&);

Scores Score(const Tensor& hidden, const Tensor& weight, const Tensor& target) {
  const auto score = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("logprobd::linear_logprob", "")
                         .typed<LinearLogprob>();
  return score.call(
      hidden, weight, target, /*bias=*/std::nullopt, /*row_temperature=*/std::nullopt,
      /*mean_logit_weights=*/std::nullopt, /*candidate_ids=*/std::nullopt,
      /*candidate_offsets=*/std::nullopt, /*temperature=*/0.5, /*scale=*/1, /*softcap=*/0,
      /*ignore_index=*/-100, /*vocab_start=*/0, /*vocab_valid=*/-1, /*group=*/"",
      /*sequence_parallel=*/false, /*partial_hidden_gradient=*/false,
      /*out_of_vocab_is_zero=*/false, /*need_entropy=*/true,
      /*need_argmax=*/false, /*need_mean_logit=*/false, /*need_max_logit=*/false,
      /*need_min_logit=*/false, /*need_sum_p_squared=*/false, /*need_target_rank=*/false,
      /*top_k=*/0, /*keep_logits=*/0, /*cached_rows=*/-1, /*autocast=*/true,
      /*hidden_splits=*/2, /*need_gradients=*/false, /*weight_grad=*/std::nullopt);
}

class LinearLogprobTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_NE(dlopen(LIBRARY, RTLD_NOW), nullptr) << dlerror(); }
};

TEST_F(LinearLogprobTest, TheLoadedLibraryComputesScoresAndGradients) {
  at::manual_seed(1);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const Tensor hidden = at::randn({7, 16}, options).requires_grad_();
  const Tensor weight = at::randn({300, 16}, options).requires_grad_();
  const Tensor target = at::randint(0, 300, {7}, at::kLong);
  const Tensor log_p = at::log_softmax(hidden.matmul(weight.t()) / 0.5, 1);
  const Tensor picked = log_p.gather(1, target.unsqueeze(1)).squeeze(1);
  const Tensor truth = (picked - (log_p.exp() * log_p).sum(1)).sum();

  const Scores scores = Score(hidden, weight, target);
  const Tensor loss = (std::get<0>(scores) + std::get<1>(scores)).sum();

  EXPECT_TRUE(at::allclose(loss, truth, 1e-10, 1e-10));
  loss.backward();
  const Tensor d_hidden = hidden.grad().clone();
  hidden.mutable_grad() = Tensor();
  truth.backward();
  EXPECT_TRUE(at::allclose(d_hidden, hidden.grad(), 1e-9, 1e-9));
}

TEST_F(LinearLogprobTest, ThrowsValueErrorForShapesThatDoNotFit) {
  const Tensor hidden = at::zeros({2, 8}), weight = at::zeros({5, 9});

  EXPECT_THROW(Score(hidden, weight, at::zeros({2}, at::kLong)), c10::ValueError);
}

}  // namespace
}  // namespace logprobd::torch_ops
