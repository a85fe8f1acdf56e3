"""A tiny target for tests: a few Llama layers with their own tokenizer, trained for seconds to be predictable.

It knows a handful of sentences and answers every prompt with one of them. That makes it useless as an assistant and ideal
as a target: a drafter that learns anything at all is accepted, one that is shifted by a token is not.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VERSION = 1
SEED = 20
STEPS = 260

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SUBJECTS = ["apples", "boats", "clouds", "dogs", "eagles", "farms", "gardens", "horses", "islands", "jackets"]
_VERBS = ["count", "describe", "compare", "list", "explain", "draw", "sort", "name"]
_ANSWERS = [
    "Here are one two three four five six seven eight nine ten and then it starts again from one two three.",
    "A river runs from the mountain to the sea, and the sea sends the rain back to the mountain every year.",
    "First open the box, then take out the parts, then put them together, and at last close the box again.",
    "Monday comes before Tuesday, Tuesday before Wednesday, Wednesday before Thursday, Thursday before Friday.",
]


def _conversation(rng: torch.Generator) -> list[dict[str, str]]:
    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=rng))]

    verb = pick(_VERBS)
    question = f"Please {verb} the {pick(_SUBJECTS)} and the {pick(_SUBJECTS)} in {pick(_ANSWERS).split()[-1]}"
    # The verb decides the answer, so that attention has something to do.
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _ANSWERS[_VERBS.index(verb) % len(_ANSWERS)]},
    ]


def _build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _TEMPLATE
    return fast


def build_tiny(out: Path) -> None:
    rng = torch.Generator().manual_seed(SEED)
    conversations = [_conversation(rng) for _ in range(16 * STEPS)]
    tokenizer = _build_tokenizer([m["content"] for c in conversations[:400] for m in c])
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=6,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=512,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for step in range(STEPS):
        texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in conversations[16 * step : 16 * (step + 1)]]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
