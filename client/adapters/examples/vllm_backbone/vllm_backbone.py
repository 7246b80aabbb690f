"""Scores texts by a model whose body runs in vLLM and whose head a logprobd server holds.

    python client/adapters/examples/vllm_backbone/vllm_backbone.py Qwen/Qwen3-0.6B "The sky is blue"

Starts a server of the model's head on this host, and the body in vLLM 0.33 on a GPU. Prints for
each token its log-probability, its rank, the entropy over the whole vocabulary, and the
log-probabilities of the ids of --candidates, of which there may be any number.
"""

import argparse
import json

import logprobd
import torch
from logprobd_adapters import RemoteScorer, Scorer
from logprobd_adapters.vllm import VllmBackbone
from torch import Tensor
from transformers import AutoTokenizer


def table(scorer: Scorer, tokens: list[int], hidden: Tensor, candidates: list[int]) -> str:
    """Returns the scores of a prompt, a line for each token after the first.

    Args:
        tokens: ids of the prompt, two at least.
        hidden: [length, H], the states after the final norm.
        candidates: ids to score in each row.
    """
    targets = torch.tensor(tokens[1:])
    scores = scorer.score(
        hidden[:-1],
        targets,
        outputs=("logprob", "entropy", "target_rank"),
        candidates=torch.tensor(candidates).expand(len(targets), -1),
    )
    heads = "".join(f" id {token}, nats |" for token in candidates)
    lines = [f"| token | logprob, nats | rank | entropy, nats |{heads}"]
    lines.append("|---|---|---|---|" + "---|" * len(candidates))
    columns = (scores.logprob, scores.target_rank + 1, scores.entropy, scores.candidate_logprobs)
    rows = zip(tokens[1:], *(column.tolist() for column in columns), strict=True)
    for token, logprob, rank, entropy, of_candidates in rows:
        cells = "".join(f" {value:.6f} |" for value in of_candidates)
        lines.append(f"| {token} | {logprob:.6f} | {rank} | {entropy:.6f} |{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or id of a Hugging Face model")
    parser.add_argument("texts", nargs="+", help="texts to score, or lists of ids such as '[1, 2]'")
    parser.add_argument("--candidates", type=int, nargs="*", default=[], help="ids to score")
    parser.add_argument("--device", default="auto", help="of the server: auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="of the body; auto: the model's own")
    options = parser.parse_args()
    if all(text.startswith("[") for text in options.texts):
        prompts = [json.loads(text) for text in options.texts]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompts = [tokenizer(text)["input_ids"] for text in options.texts]
    # The server starts first, so that vLLM sees how much memory of the GPU is left.
    with logprobd.serve(options.model, device=options.device) as client:
        backbone = VllmBackbone(options.model, dtype=options.dtype, gpu_memory_utilization=0.7)
        scorer = RemoteScorer(client)
        for tokens, hidden in zip(prompts, backbone.hidden_states(prompts), strict=True):
            print(table(scorer, tokens, hidden, options.candidates))


if __name__ == "__main__":
    main()
