"""Inputs for tests of divergences, and the divergences of materialised logits in fp64."""

import math
from typing import NamedTuple

import torch
from linear_logprob_reference import seeded
from torch import Tensor

KINDS = ("forward_kl", "reverse_kl", "jsd")


class Case(NamedTuple):
    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.student_hidden, self.student_weight


def make_case(rows=11, vocab=200, dtype=torch.float64, spread_max=20.0, gap=0.3, seed=0) -> Case:
    """Returns rows whose logits have standard deviations from 1 (flat) to spread_max (peaked). The student's logits
    are near the teacher's, at a distance of `gap` of the spread; the teacher's hidden size is larger."""
    generator = seeded(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size = 16
    spread = torch.linspace(1, spread_max, rows, dtype=torch.float64).unsqueeze(-1)
    weight = normal(vocab, size) / size**0.5
    hidden = spread * normal(rows, size)
    more = gap * spread * normal(rows, 8)
    teacher_hidden = torch.cat((hidden, more), -1)
    teacher_weight = torch.cat((weight, normal(vocab, 8) / size**0.5), -1)
    tensors = [each.to(dtype) for each in (hidden, weight, teacher_hidden, teacher_weight)]
    return Case(*(each.requires_grad_() for each in tensors[:2]), *tensors[2:])


def logits_of(hidden, weight, bias, scale, softcap, vocab_valid) -> Tensor:
    z = scale * (hidden.double() @ weight.double().T)
    if bias is not None:
        z = z + bias.double()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z[..., :vocab_valid]


def reference(
    case: Case,
    kind="forward_kl",
    beta=0.5,
    temperature=1.0,
    student_bias=None,
    teacher_bias=None,
    student_scale=1.0,
    teacher_scale=1.0,
    student_softcap=None,
    teacher_softcap=None,
    vocab_valid=None,
) -> tuple[Tensor, Tensor]:
    """Returns divergence and entropy in fp64, differentiable."""
    t = temperature.unsqueeze(-1).double() if isinstance(temperature, Tensor) else temperature
    student, teacher = (
        (logits_of(*each, vocab_valid) / t).log_softmax(-1)
        for each in (
            (
                case.student_hidden,
                case.student_weight,
                student_bias,
                student_scale,
                student_softcap,
            ),
            (
                case.teacher_hidden,
                case.teacher_weight,
                teacher_bias,
                teacher_scale,
                teacher_softcap,
            ),
        )
    )

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if kind == "forward_kl":
        divergence = kl(teacher, student)
    elif kind == "reverse_kl":
        divergence = kl(student, teacher)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        divergence = beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
    return divergence, -(student.exp() * student).sum(-1)


def error_of(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()
