"""The functions of torch that draw random numbers, and how each is told what to draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional, init

_nn: Any = torch._C._nn

# Take a `generator` argument.
WITH_GENERATOR = frozenset(
    [
        torch._sample_dirichlet,
        torch._standard_gamma,
        torch.bernoulli,
        torch.binomial,
        torch.multinomial,
        torch.normal,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
        torch.randperm,
        torch.poisson,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.multinomial,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
        init.kaiming_normal_,
        init.kaiming_uniform_,
        init.normal_,
        init.orthogonal_,
        init.sparse_,
        init.trunc_normal_,
        init.uniform_,
        init.xavier_normal_,
        init.xavier_uniform_,
        _nn.rrelu_with_noise,
        _nn.rrelu_with_noise_,
    ]
)
# Draw from the default generator without a way to name another. Each with the arguments without
# which it draws nothing: their names, places and defaults.
_P = ("p", 1, 0.5)
_TRAINING = ("training", 2, True)
WITHOUT_GENERATOR: dict[Callable[..., Any], tuple[tuple[str, int, Any], ...]] = {
    functional.alpha_dropout: (_P, ("training", 2, False)),
    functional.dropout1d: (_P, _TRAINING),
    functional.dropout2d: (_P, _TRAINING),
    functional.dropout3d: (_P, _TRAINING),
    functional.feature_alpha_dropout: (_P, ("training", 2, False)),
    functional.fractional_max_pool2d: (),
    functional.fractional_max_pool3d: (),
    functional.fractional_max_pool2d_with_indices: (),
    functional.fractional_max_pool3d_with_indices: (),
    functional.gumbel_softmax: (),
    functional.multi_head_attention_forward: (("dropout_p", 10, 0.0), ("training", 13, True)),
    functional.rrelu: (("training", 3, False),),
    functional.scaled_dot_product_attention: (("dropout_p", 4, 0.0),),
    torch.alpha_dropout: (_P, ("train", 2, True)),
    torch.feature_alpha_dropout: (_P, ("train", 2, True)),
    torch.feature_dropout: (_P, ("train", 2, True)),
    torch.alpha_dropout_: (_P, ("train", 2, True)),
    torch.dropout_: (_P, ("train", 2, True)),
    torch.feature_alpha_dropout_: (_P, ("train", 2, True)),
    torch.feature_dropout_: (_P, ("train", 2, True)),
    torch.native_dropout: (_P, ("train", 2, True)),
    torch.rrelu: (("training", 3, False),),
    torch.rrelu_: (("training", 3, False),),
    # Written in Python: what they call draws while they run, unseen by a replica's mode.
    torch.lobpcg: (),
    torch.pca_lowrank: (),
    torch.svd_lowrank: (),
}
RECURRENT = frozenset([torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh])
DROPOUT = frozenset([functional.dropout, torch.dropout])
RANDOM = frozenset([*WITH_GENERATOR, *WITHOUT_GENERATOR, *RECURRENT, *DROPOUT])


def draws_from_default(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call draws from the default generator, which it cannot be told to leave alone."""
    if func in RECURRENT:
        # In both their signatures the dropout is the first float, and training comes after it.
        at = next((i for i, value in enumerate(args) if isinstance(value, float)), None)
        return at is not None and args[at] > 0 and bool(args[at + 1])
    if func not in WITHOUT_GENERATOR:
        return False
    return all(
        kwargs.get(name, args[place] if place < len(args) else default)
        for name, place, default in WITHOUT_GENERATOR[func]
    )
