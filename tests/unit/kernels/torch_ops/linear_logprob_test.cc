// A C++ program loads the library and calls the operator by its name. The Python tests in this
// folder test the results.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;
using Values = std::map<std::string, c10::IValue>;

/// Returns the operator's results by their names.
Values Score(const Tensor& hidden, const Tensor& weight, const Tensor& target) {
  const Values given = {
      {"hidden", hidden},  {"weight", weight}, {"target", target},     {"temperature", 0.5},
      {"scale", 1.0},      {"softcap", 0.0},   {"ignore_index", -100}, {"vocab_start", 0},
      {"vocab_valid", -1}, {"group", ""},      {"need_entropy", true}, {"autocast", true},
      {"top_k", 0},        {"keep_logits", 0}, {"cached_rows", -1},    {"hidden_splits", 2}};
  const auto score = c10::Dispatcher::singleton().findSchemaOrThrow("logprobd::linear_logprob", "");
  std::vector<c10::IValue> stack;
  for (const c10::Argument& argument : score.schema().arguments()) {
    const auto found = given.find(argument.name());
    const bool is_flag = argument.type()->kind() == c10::TypeKind::BoolType;
    const c10::IValue absent = is_flag ? c10::IValue(false) : c10::IValue();
    stack.push_back(found == given.end() ? absent : found->second);
  }
  score.callBoxed(stack);
  Values results;
  for (size_t i = 0; i < stack.size(); ++i) {
    results[score.schema().returns()[i].name()] = stack[i];
  }
  return results;
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

  const Values scores = Score(hidden, weight, target);
  const Tensor loss = (scores.at("logprob").toTensor() + scores.at("entropy").toTensor()).sum();

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
