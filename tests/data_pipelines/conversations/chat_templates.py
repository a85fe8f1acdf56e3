"""Tokenizers of fourteen kinds, each tiny, with chat templates that have the structure of the family's own.

What matters of each is how it builds a conversation: what opens and ends a turn, what it adds or strips, what it refuses,
what it does with reasoning and tools, and how its tokenizer cuts text. The wording is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.data_pipelines.conversations.template_texts import (
    CHATML,
    COMMAND_R,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    GEMMA,
    GLM,
    HARMONY,
    KIMI,
    LLAMA3,
    MERGING,
    MISTRAL,
    PHI,
    QWEN3,
    QWEN3_THINKING,
)

_TEXTS = [
    "Hello there. How many apples are in the box? There are one two three four apples in the box.",
    "The river runs from the mountain to the sea. What is the weather in Paris today? It is sunny.",
    "user assistant system developer tool model analysis final commentary think name arguments city Paris",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n\nUser:\nAnswer:\n\nThe answer:\n\n",
    "User:\nWhat?\nAnswer:\nThe answer is four.\n",
] * 4


# White space up to the end of a line is one piece, so that "\\n\\n" before a word stays whole.
_LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """opens, ends: what the template puts around a plain last answer, apart from the header that prompts for it.
    writes: what it makes of the answer itself."""

    template: str | dict[str, str]
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    opens: str = ""
    ends: str = ""
    pieces: str = "bytes"  # GPT-2's bytes; lines: Llama-3's; free: bytes that merge anywhere; spaces: SentencePiece's
    rstrip: bool = False  # special tokens swallow the white space after them
    added: tuple[str, ...] = ()  # tokens that are added and not special
    writes: Callable[[str], str] = str


_DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)

FAMILIES = {
    "chatml": Family(CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", ends="<|im_end|>"),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
        ends="<|eot_id|>",
        pieces="lines",
        writes=str.strip,
    ),
    "qwen3": Family(
        QWEN3,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        opens="<think>\n\n</think>\n\n",
        pieces="lines",
        ends="<|im_end|>",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        writes=lambda text: text.lstrip("\n"),
    ),
    "qwen3_thinking": Family(
        QWEN3_THINKING,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        opens="\n</think>\n\n",
        ends="<|im_end|>",
        pieces="lines",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        writes=lambda text: text.lstrip("\n"),
    ),
    "gemma": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<bos>",
        ends="<end_of_turn>",
        pieces="spaces",
        writes=str.strip,
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|return|>",
        opens="<|channel|>final<|message|>",
        pieces="lines",
        ends="<|return|>",
    ),
    "deepseek_r1": Family(
        DEEPSEEK_R1,
        _DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        ends="<｜end▁of▁sentence｜>",
        pieces="lines",
        added=("<think>", "</think>"),
    ),
    "deepseek_v3": Family(
        DEEPSEEK_V3,
        _DEEPSEEK_TOKENS,
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        ends="<｜end▁of▁sentence｜>",
        pieces="lines",
    ),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
        "<s>",
        opens=" ",
        ends="</s>",
        pieces="spaces",
        writes=str.strip,
    ),
    "phi": Family(
        PHI,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        ends="<|end|>",
        rstrip=True,
        writes=str.lstrip,
    ),
    "kimi": Family(
        KIMI,
        (
            *("[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        "[EOS]",
        ends="<|im_end|>",
        pieces="lines",
    ),
    "glm": Family(
        GLM,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        opens="\n<think></think>\n",
        pieces="lines",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        writes=str.strip,
    ),
    "command_r": Family(
        COMMAND_R,
        (
            *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
            *("<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        ),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        opens="<|START_RESPONSE|>",
        ends="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "merging": Family(MERGING, ("</s>",), "</s>", ends="</s>", pieces="free"),
}

# Templates with generation markers: around the end of turn or not; with reasoning stripped from earlier turns or not.
MARKED = {
    "chatml": CHATML.replace(
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
        "{% endif %}{{ '\n' }}",
    ),
    "llama3": LLAMA3.replace(
        "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}",
        "{%- elif m.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{%- generation %}{{ m.content | trim }}{%- endgeneration %}{{ '<|eot_id|>' }}"
        "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}",
    ),
    "gemma": GEMMA.replace(
        "{{- m.content | trim + '<end_of_turn>\n' }}",
        "{%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<end_of_turn>\n' }}{% endgeneration %}"
        "{%- else %}{{ m.content | trim + '<end_of_turn>\n' }}{% endif %}",
    ),
}


@cache
def tokenizer_of(name: str, marked: bool = False) -> PreTrainedTokenizerBase:
    """The family's tokenizer, with its template, or with the one of `MARKED`."""
    family = FAMILIES[name]
    extra = [AddedToken(t, special=True, normalized=False, rstrip=family.rstrip) for t in family.special]
    extra += [AddedToken(t, special=False, normalized=False) for t in family.added]
    if family.pieces != "spaces":
        backend = Tokenizer(models.BPE())
        by_regex = pre_tokenizers.Split(Regex(_LINES), "isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.pieces == "bytes")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [by_regex, by_bytes] if family.pieces == "lines" else [by_bytes]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        byte_tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=byte_tokens, show_progress=False)
    backend.train_from_iterator(_TEXTS, trainer)
    backend.add_tokens(extra)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[t for t in family.special if t not in (family.eos, family.bos)],
    )
    tokenizer.chat_template = MARKED[name] if marked else family.template
    return tokenizer


def trained_texts(tokenizer: PreTrainedTokenizerBase, document: tuple[list[int], list[bool]]) -> list[str]:
    """The text of each run of tokens that is trained on."""
    ids, mask = document
    assert len(ids) == len(mask) and mask[-1]
    runs = [[i for i, _ in group] for on, group in groupby(zip(ids, mask), key=lambda pair: pair[1]) if on]
    return [tokenizer.decode(run) for run in runs]


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with another template, for which it knows four more special tokens."""
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"]})
    other.chat_template = template
    return other
