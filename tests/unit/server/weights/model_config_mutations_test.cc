#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace logprobd {
namespace {

TEST(ModelConfigMutationsTest, KeepsThePromisesOfTheParserForTwentyThousandMutations) {
  const std::vector<std::string> corpus = {
      R"({"model_type":"granite","hidden_size":64,"vocab_size":512,"logits_scaling":8.0,)"
      R"("final_logit_softcapping":null,"tie_word_embeddings":true,"lm_head_bias":false})",
      R"({"text_config":{"hidden_size":64,"time_step_limit":[0.0,Infinity],"logit_scale":-NaN},)"
      R"("vocab_size":9,"dim_model_base":256,"model_type":"a\u0000b"})",
      R"({"thinker_config":{"text_config":{"d_model":8}},"n_embd":1e9,"mup_x":[{"a":{}}]})",
      R"({"metadata":{"total_size":1},"weight_map":{"a":"1.safetensors","b":"../2.safetensors"}})",
  };
  const std::string alphabet = "{}[]\",:0123456789eE+-.\\ntrufalsNIiy/ \x80\xC3\xFF";
  std::mt19937 random(7);

  for (int i = 0; i < 20'000; ++i) {
    std::string text = corpus[random() % corpus.size()];
    for (size_t change = 1 + random() % 4; change > 0 && !text.empty(); --change) {
      const size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = alphabet[random() % alphabet.size()];
          break;
        case 1:
          text.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        default:
          text.erase(at, 1 + random() % 6);
          break;
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  }
}

}  // namespace
}  // namespace logprobd
