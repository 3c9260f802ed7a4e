"""Models of Hugging Face, with random weights: batches and outputs that are mappings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from late import Late
from torch import nn

import unisono as uo

transformers = Late("transformers")
Make = Callable[..., uo.MirroredStrategy]

SMALL: dict[str, Any] = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "GPT2": lambda: transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, **SMALL),
    "Llama": lambda: transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        **SMALL,
    ),
    "BERT": lambda: transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, **SMALL
    ),
    "T5": lambda: transformers.T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, **SMALL
    ),
}
AUTO = {
    "GPT2": "AutoModelForCausalLM",
    "Llama": "AutoModelForCausalLM",
    "BERT": "AutoModelForMaskedLM",
    "T5": "AutoModelForSeq2SeqLM",
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for rate in [key for key in vars(config) if "drop" in key]:
        setattr(config, rate, 0.0)
    model: nn.Module = getattr(transformers, AUTO[name]).from_config(config)
    return model.double().train()


def batches() -> list[Any]:
    """A full batch, one that does not divide, and one with fewer samples than replicas."""
    tokens = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(1))
    return [
        transformers.BatchEncoding({"input_ids": part, "labels": part})
        for part in (tokens[:6], tokens[:4], tokens[:2])
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    optimizer.zero_grad()
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    return output


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_take_no_empty_batch_train_as_on_one_device(mirrored: Make, name: str) -> None:
    one = model_of(name)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    expected = [train(one, optimizer, batch) for batch in batches()]

    strategy = mirrored(3)
    with strategy.scope():
        model = model_of(name)
        shared = torch.optim.SGD(model.parameters(), 0.1)
    distributed = strategy.experimental_distribute_dataset(batches())
    for batch, output in zip(distributed, expected, strict=True):
        assert isinstance(batch, transformers.BatchEncoding)
        found = strategy.run(train, args=(model, shared, batch))
        assert type(found) is type(output)
        torch.testing.assert_close(strategy.reduce("MEAN", found.loss), output.loss.detach())
        torch.testing.assert_close(strategy.gather(found.logits, 0), output.logits.detach())

    # The losses are computed in single precision.
    for mine, others in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-5, atol=1e-7)
