"""Scores prompts with the body of a model in vLLM and its head in a logprobd server.

    python client/adapters/examples/vllm_backbone/vllm_backbone.py MODEL --address HOST:PORT

Needs a GPU with vLLM 0.33, and a server of the same model (logprobd --model MODEL). vLLM loads no
head and returns hidden states; the server gives the log-probability of each token, the entropy over
the whole vocabulary and the log-probabilities of any number of candidates. Prints a line a token.
"""

import argparse

import logprobd
import numpy as np
from logprobd_adapters.vllm import VllmBackbone

CANDIDATES = 256


def score(
    backbone: VllmBackbone, client: logprobd.Client, tokens: list[int], num_candidates: int
) -> logprobd.ScoreResult:
    """Returns the scores of tokens[1:], each with the first ids of the vocabulary as candidates."""
    (hidden,) = backbone.hidden_states([tokens])
    rows = len(tokens) - 1
    candidates = np.tile(np.arange(num_candidates), (rows, 1))
    return client.score(hidden[:-1], tokens[1:], candidates=candidates)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="folder or id of a Hugging Face causal model")
    parser.add_argument("--address", default="127.0.0.1:8470", metavar="HOST:PORT")
    parser.add_argument("--tokens", default="1,2,3,4,5,6,7,8", help="ids with commas between them")
    options = parser.parse_args(arguments)
    tokens = [int(token) for token in options.tokens.split(",")]
    with logprobd.Client(options.address) as client:
        client.wait_ready(60)
        result = score(VllmBackbone(options.model), client, tokens, CANDIDATES)
    print("token  logprob   entropy")
    for token, logprob, entropy in zip(tokens[1:], result.logprob, result.entropy, strict=True):
        print(f"{token:5d}  {logprob:8.4f}  {entropy:8.4f}")


if __name__ == "__main__":
    main()
