"""The Trainer of Hugging Face Transformers over Unisono.

    torchrun --nproc-per-node 2 examples/torch_backend/with_hf_trainer.py

On CPUs, `TrainingArguments(ddp_backend=...)` accepts only Accelerate's own backends. The Trainer
keeps a process group that already exists, so the program creates the group first.
"""

from __future__ import annotations

import tempfile

import torch
from torch import distributed
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> float:
    distributed.init_process_group("unisono")  # before the TrainingArguments
    # Sentences that count: 3 4 5 6 7 8 9 10.
    sentences = [torch.arange(first, first + 8) for first in range(16)]
    dataset = [{"input_ids": one, "labels": one} for one in sentences]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=24,
        n_positions=8,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            num_train_epochs=10,
            learning_rate=1e-2,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        result = Trainer(model, arguments, train_dataset=dataset).train()

    if distributed.get_rank() == 0:
        print(f"{distributed.get_backend()}: loss {result.training_loss:.6f}")
    distributed.destroy_process_group()
    return float(result.training_loss)


if __name__ == "__main__":
    main()
