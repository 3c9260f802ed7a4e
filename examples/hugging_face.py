"""Trains a Hugging Face model and its tokenizer on made-up film reviews.

    python examples/hugging_face.py                 # all GPUs, or one CPU replica
    python examples/hugging_face.py --replicas 2

Nothing is downloaded: the tokenizer learns its words from the reviews, and a small BERT starts with
random weights. Write `AutoTokenizer.from_pretrained(name)` and
`AutoModelForSequenceClassification.from_pretrained(name)` in their place to fine-tune a model of
the Hub. Everything else stays. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

import unisono as uo

Review = tuple[str, int]


def reviews() -> list[Review]:
    """Returns sentences, and whether each is friendly."""
    things = ("film", "story", "music", "cast", "ending", "picture")
    words = {1: ("good", "great", "lovely"), 0: ("bad", "dull", "awful")}
    rows = []
    for (label, choices), thing in itertools.product(words.items(), things):
        for word in choices:
            rows += [(f"the {thing} was {word}", label), (f"a really {word} {thing} , all", label)]
    return rows


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, help="CPU replicas (default: all GPUs)")
    parser.add_argument("--epochs", type=int, default=6, help="number of epochs (default: 6)")
    parser.add_argument("--save", type=Path, help="a folder for the model and the tokenizer")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    rows = reviews()
    tokenizer = make_tokenizer([text for text, _ in rows])
    devices = None if options.replicas is None else [f"cpu:{i}" for i in range(options.replicas)]
    strategy = uo.MirroredStrategy(devices)
    with strategy.scope():
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = BertForSequenceClassification(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def collate(batch: list[Review]) -> dict[str, Tensor]:
        texts, labels = zip(*batch, strict=True)
        tokens = tokenizer(list(texts), padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor(labels)}

    def train_step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def validation_step(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(**batch).logits
        return (logits.argmax(1) == batch["labels"]).float()  # one number per review

    # A distributed batch is a dict, too: each replica gets its part of every tensor.
    held_out: Any = rows[::5]
    kept: Any = [row for number, row in enumerate(rows) if number % 5]
    batches = strategy.experimental_distribute_dataset(
        DataLoader(kept, batch_size=16, shuffle=True, collate_fn=collate)
    )
    held_out_batches = strategy.experimental_distribute_dataset(
        DataLoader(held_out, batch_size=16, collate_fn=collate)
    )
    accuracy = 0.0
    for epoch in range(options.epochs):
        model.train()
        for batch in batches:
            losses = strategy.run(train_step, args=(batch,))
        model.eval()
        num_right = sum(
            strategy.reduce("SUM", strategy.run(validation_step, args=(batch,)), axis=0).item()
            for batch in held_out_batches
        )
        accuracy = num_right / len(held_out)
        loss = strategy.reduce("MEAN", losses).item()
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    strategy.close()
    if options.save is not None:
        model.save_pretrained(options.save)  # loads without Unisono
        tokenizer.save_pretrained(options.save)
    return accuracy


if __name__ == "__main__":
    main()
