"""Programs that use packages which many programs use. None downloads anything."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from programs.generative import numbers
from programs.language import VOCABULARY, words
from programs.running import Learned, program


@program(package="torchmetrics")
def torchmetrics(strategy: Any) -> Learned:
    """Trains and validates, and counts with metrics in both."""
    tm: Any = importlib.import_module("torchmetrics")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        train_loss = tm.MeanMetric()
        accuracy = tm.Accuracy(task="multiclass", num_classes=3)
    validation = strategy.mirror(
        tm.MetricCollection(
            {
                "accuracy": tm.Accuracy(task="multiclass", num_classes=3),
                "precision": tm.Precision(task="multiclass", num_classes=3, average="macro"),
                "auroc": tm.AUROC(task="multiclass", num_classes=3),
                "confusion": tm.ConfusionMatrix(task="multiclass", num_classes=3),
            }
        )
    )
    largest, kept = strategy.mirror(tm.MaxMetric()), strategy.mirror(tm.CatMetric())

    def train_step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        train_loss.update(loss.detach(), weight=len(x))
        accuracy(logits, y)

    def validation_step(x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            logits = model(x)
        validation.update(logits, y)
        largest.update(logits)
        kept.update(logits.sum(1))

    dataset = TensorDataset(numbers(10, 6), words(10, high=3))
    loader = strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    learned: Learned = {}
    for epoch in range(2):
        train_loss.reset()
        accuracy.reset()
        validation.reset()
        for batch in loader:
            strategy.run(train_step, args=batch)
        for batch in loader:
            strategy.run(validation_step, args=batch)
        # Once more, without replicas: it counts once.
        logits = model(numbers(4, 6, seed=8)).detach()
        validation.update(logits, words(4, high=3))
        found = {"loss": train_loss.compute(), "training accuracy": accuracy.compute()}
        found |= {"largest": largest.compute(), "kept": kept.compute(), **validation.compute()}
        learned |= {f"{epoch} {name}": value for name, value in found.items()}
        assert accuracy.update_count == 3
    return {**model.state_dict(), **learned}


def train_language_model(strategy: Any, make: Any, loss_of: Any) -> Learned:
    """Trains a tiny model without dropout. Its loss is not compared: it is computed in float32."""
    with strategy.scope():
        model = make(importlib.import_module("transformers")).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(inputs: Tensor, mask: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, mask).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    inputs = words(6, 5, high=VOCABULARY)
    dataset = TensorDataset(inputs, torch.ones_like(inputs))
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    learned: Learned = model.state_dict()
    return learned


def loss_with_labels(model: nn.Module, inputs: Tensor, mask: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=inputs, attention_mask=mask, labels=inputs).loss
    return loss


@program(package="transformers")
def gpt2(strategy: Any) -> Learned:
    def make(transformers: Any) -> Any:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    return train_language_model(strategy, make, loss_with_labels)


@program(package="transformers")
def llama(strategy: Any) -> Learned:
    def make(transformers: Any) -> Any:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    return train_language_model(strategy, make, loss_with_labels)


@program(package="transformers")
def t5(strategy: Any) -> Learned:
    def make(transformers: Any) -> Any:
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)

    return train_language_model(strategy, make, loss_with_labels)


@program(package="transformers")
def bert(strategy: Any) -> Learned:
    def make(transformers: Any) -> Any:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, num_labels=3, pad_token_id=0,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)

    def loss_of(model: nn.Module, inputs: Tensor, mask: Tensor) -> Tensor:
        labels = inputs[:, 0] % 3
        loss: Tensor = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        return loss

    return train_language_model(strategy, make, loss_of)


@program(package="peft")
def peft(strategy: Any) -> Learned:
    """Adapters of peft in a GPT-2, made in the scope as for one device."""

    def make(transformers: Any) -> Any:
        own: Any = importlib.import_module("peft")
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        lora = own.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return own.get_peft_model(transformers.GPT2LMHeadModel(config), lora)

    return train_language_model(strategy, make, loss_with_labels)


@program(package="transformers", tolerance=1e-5, dtype=torch.float32)
def speech(strategy: Any) -> Learned:
    """The model computes a CTC loss with cuDNN switched off, which CPUs do not have."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, ctc_loss_reduction="mean",
    )  # fmt: skip
    with strategy.scope():
        model = transformers.Wav2Vec2ForCTC(config).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(sounds: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        model(input_values=sounds, labels=labels).loss.backward()
        optimizer.step()

    dataset = TensorDataset(numbers(6, 80), words(6, 4, high=VOCABULARY - 1) + 1)
    for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4)):
        strategy.run(step, args=batch)
    learned: Learned = model.state_dict()
    return learned
