from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.conversations.messages import Conversation, read_conversation
from data_pipelines.conversations.quarantine import Unrenderable
from data_pipelines.conversations.rendering import RenderOptions, prompt_ids, render_documents, stop_ids
from data_pipelines.conversations.templates import TODAY, ChatTemplate, check_template
from data_pipelines.errors import UserError
from tests.data_pipelines.conversations.chat_templates import (
    FAMILIES,
    MARKED,
    tokenizer_of,
    trained_texts,
    with_template,
)
from tests.data_pipelines.conversations.nasty_rows import PARIS, RESULT, SUNNY, WEATHER, answer, call, turn, user
from tests.data_pipelines.conversations.template_texts import HEADERS, PLAIN, STRICT


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return tiny_target.load_tokenizer()


def talk(*contents: str, cut: bool = False) -> Conversation:
    """Questions and answers by turns."""
    return read_conversation([(user, answer)[i % 2](c) for i, c in enumerate(contents)], truncated=cut)


def only(tokenizer, conversation: Conversation, **options) -> tuple[list[int], list[bool]]:
    (document,) = render_documents(tokenizer, conversation, RenderOptions(**options))
    return document


def trained(tokenizer, conversation: Conversation, **options) -> list[list[str]]:
    documents = render_documents(tokenizer, conversation, RenderOptions(**options))
    return [trained_texts(tokenizer, document) for document in documents]


def test_the_answers_and_their_ends_are_trained_on_and_nothing_else(tokenizer):
    whole = talk("Please count the apples", "Here are one two.", "And again?", "Three four.")
    ids, mask = only(tokenizer, whole)
    assert trained_texts(tokenizer, (ids, mask)) == ["Here are one two.<|im_end|>", "Three four.<|im_end|>"]
    rendered = tokenizer.apply_chat_template(whole.messages, tokenize=False)
    assert tokenizer.decode(ids) == rendered.removesuffix("\n")  # nothing after the last end of turn is needed
    assert ids == tokenizer.apply_chat_template(whole.messages, return_dict=False)[: len(ids)]


@pytest.mark.parametrize(
    ("template", "ends"),
    [(HEADERS, "<|eot|>"), (PLAIN, ""), (STRICT, "<|eot|>")],
    ids=["headers", "plain", "strict"],
)
def test_other_templates(tokenizer, template, ends):
    other = with_template(tokenizer, template)
    contents = ("Hello there", "One two three", "More", "Four")
    assert trained(other, talk(*contents)) == [["One two three" + ends, "Four" + ends]]
    assert trained(other, talk(*contents, cut=True)) == [["One two three" + ends, "Four"]]


def test_an_answer_cut_by_the_limit_gets_no_end_of_turn(tokenizer):
    whole, _ = only(tokenizer, talk("Count", "one two three"))
    ids, mask = only(tokenizer, talk("Count", "one two three", cut=True))
    assert ids == whole[:-1] and whole[-1] == tokenizer.eos_token_id and mask[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_beginning_of_text_is_doubled(family):
    tokenizer = tokenizer_of(family)
    prompt = prompt_ids(tokenizer, [user("Hi")])
    assert prompt.count(tokenizer.bos_token_id) == (1 if FAMILIES[family].bos else 0)


def test_user_text_that_looks_like_a_header_without_special_tokens_is_not_trained_on():
    merging = tokenizer_of("merging")
    forged = talk("Hi\nAnswer:\nI am trained on\nUser:\nreally", "No.", "Answer:\nAnswer:\n", "Again no.")
    assert trained(merging, forged) == [["No.</s>", "Again no.</s>"]]


def test_text_of_special_tokens_is_quarantined_wherever_it_stands():
    llama = tokenizer_of("llama3")
    token = "<|eot_id|>"
    rows = [
        ([user(f"Hi{token}"), answer("Hello")], None),
        ([user("Hi"), answer(f"Hello{token} there")], None),
        ([turn("system", f"{token}"), user("Hi"), answer("Hello")], None),
        ([user("Hi"), answer(None, tool_calls=[call({"city": f"Paris{token}"})])], [WEATHER]),
        ([user("Hi"), answer("Hello")], [{"type": "function", "function": {"name": "f", "description": token}}]),
    ]
    for messages, tools in rows:
        with pytest.raises(Unrenderable, match=r"writes out the special token <\|eot_id\|>"):
            render_documents(llama, read_conversation(messages, tools))
    near = talk("<|eot_id >", "< |eot_id|>")
    assert trained(llama, near) == [["< |eot_id|><|eot_id|>"]]


def test_an_answer_that_merges_with_its_header_is_tokenised_as_decoding_writes_it():
    merging = tokenizer_of("merging")
    asked, whole = [user("Hi")], talk("Hi", "The answer", "More", "Two.")
    prompt = prompt_ids(merging, asked)
    together = merging.apply_chat_template(whole.messages[:2], return_dict=False)
    assert together[: len(prompt)] != prompt  # the header's last new line is one token with "The"
    first, second = render_documents(merging, whole)
    assert first[0][: len(prompt)] == prompt and first[1].index(True) == len(prompt)
    assert trained_texts(merging, first) == ["The answer</s>"]
    history = prompt_ids(merging, whole.messages[:3])  # as decoding the second answer sees the first: merged
    assert second[0][: len(history)] == history and second[1].index(True) == len(history)
    assert history[: len(first[0])] != first[0]


def test_a_header_that_generation_does_not_use_is_refused(tokenizer):
    other = with_template(tokenizer, PLAIN.replace("Bot:{% endif %}", "Bot: Sure,{% endif %}"))
    with pytest.raises(Unrenderable, match="generation prompt"):
        render_documents(other, talk("Hi", "One two"))


def test_a_template_that_raises_is_a_reason(tokenizer):
    strict = with_template(tokenizer, STRICT)
    with pytest.raises(Unrenderable, match="the template raises: roles must alternate"):
        render_documents(strict, read_conversation([user("Hi"), answer("One"), answer("Two")]))


def test_no_template_is_an_error_of_the_run(tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        check_template(with_template(tokenizer, None))


def test_a_template_that_writes_the_day_writes_the_same_one_every_day():
    llama = tokenizer_of("llama3")
    assert TODAY.strftime("Today: %d %b %Y") in llama.decode(prompt_ids(llama, [user("Hi")]))
    assert "Today: 29 Feb 2024" in llama.decode(prompt_ids(llama, [user("Hi")], day=datetime(2024, 2, 29)))


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("chatml", ["<|im_end|>"]),
        ("gemma", ["<eos>", "<end_of_turn>"]),
        ("phi", ["<|endoftext|>", "<|end|>"]),
        ("command_r", ["<|END_OF_TURN_TOKEN|>"]),
        ("glm", ["<|endoftext|>"]),
    ],
)
def test_generation_stops_at_the_templates_end_of_turn(family, ends):
    tokenizer = tokenizer_of(family)
    assert stop_ids(tokenizer) == sorted(tokenizer.convert_tokens_to_ids(ends))


# options


def test_the_last_turn_only():
    for family in ("chatml", "qwen3"):
        tokenizer, ends = tokenizer_of(family), FAMILIES[family].opens + "Two.<|im_end|>"
        whole = talk("Hi", "One.", "More", "Two.")
        assert trained(tokenizer, whole, train_on="last") == [[ends]]
        ids, mask = only(tokenizer, whole, train_on="last")
        assert ids[: mask.index(True)] == prompt_ids(tokenizer, whole.messages[:-1])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek_r1"])
def test_other_roles_can_be_trained_on(family):
    tokenizer = tokenizer_of(family)
    ends = {"mistral": "[/INST]", "harmony": "<|end|>"}.get(family, FAMILIES[family].ends)
    if family in ("merging", "glm", "deepseek_v3"):  # there nothing but the next header ends a question
        ends = ""
    if family == "command_r":
        ends = "<|END_OF_TURN_TOKEN|>"
    documents = trained(tokenizer, talk("Why now?", "One."), roles=("user", "assistant"))
    assert (
        "".join(text for texts in documents for text in texts)
        == "Why now?" + ends + FAMILIES[family].opens + "One." + FAMILIES[family].ends
    )
    assert trained(tokenizer, talk("Why now?", "One."), roles=("user",)) == [["Why now?" + ends]]


def test_results_of_tools_can_be_trained_on():
    tokenizer = tokenizer_of("qwen3")
    row = read_conversation([user("Hi"), answer("", tool_calls=[call(PARIS)]), RESULT, SUNNY], [WEATHER])
    assert trained(tokenizer, row, roles=("tool",)) == [["sunny"]]


def test_reasoning_is_trained_on_or_shown_or_dropped():
    thought = read_conversation([user("Hi"), answer("Hello.", reasoning_content="I greet.\n\nI do.")])
    in_text = talk("Hi", "<think>\nI greet.\n\nI do.\n</think>\n\nHello.")
    qwen, harmony = tokenizer_of("qwen3"), tokenizer_of("harmony")
    for row in (thought, in_text):
        assert trained(qwen, row) == [["<think>\nI greet.\n\nI do.\n</think>\n\nHello.<|im_end|>"]]
        assert trained(qwen, row, reasoning="drop") == [["<think>\n\n</think>\n\nHello.<|im_end|>"]]
        # ".\n" is one token: the reasoning's
        assert trained(qwen, row, reasoning="context") == [["</think>\n\nHello.<|im_end|>"]]
    shown = "<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    assert trained(harmony, thought, reasoning="context") == [[shown]]
    whole, part = only(harmony, thought), only(harmony, thought, reasoning="context")
    assert whole[0] == part[0] and sum(whole[1]) > sum(part[1])
    written = [
        user("Hi"),
        answer("Hello.", reasoning="I greet.", token_ids=qwen.encode("<think>\nI greet.\n</think>\n\nHello.")),
    ]
    assert trained(qwen, read_conversation(written)) == [["<think>\nI greet.\n</think>\n\nHello."]]
    assert trained(qwen, read_conversation(written), reasoning="drop") == [["<think>\n\n</think>\n\nHello.<|im_end|>"]]
    assert trained(qwen, read_conversation(written), reasoning="context") == [["</think>\n\nHello.<|im_end|>"]]
    chatml = tokenizer_of("chatml")
    with pytest.raises(Unrenderable, match="leaves out the reasoning"):
        render_documents(chatml, thought)
    assert trained(chatml, thought, reasoning="drop") == [["Hello.<|im_end|>"]]
    with pytest.raises(Unrenderable, match="empty without its reasoning"):
        trained(qwen, talk("Hi", "<think>\nI greet.\n</think>\n\n"), reasoning="drop")


def test_a_weight_of_nought_is_context():
    row = read_conversation([user("Hi"), answer("Not this.", weight=0), user("More"), answer("This.")])
    assert trained(tokenizer_of("chatml"), row) == [["This.<|im_end|>"]]
    with pytest.raises(Unrenderable, match="no turn is to be trained on"):
        render_documents(tokenizer_of("chatml"), read_conversation([user("Hi"), answer("Not this.", weight=0)]))


def test_the_targets_own_tokens_are_kept_as_they_are():
    r1 = tokenizer_of("deepseek_r1")  # no rendered answer of it follows its prompt, so that only they can be trained on
    written = [r1.encode(text + r1.eos_token) for text in ("I greet.\n</think>\n\nHello.", "Two")]
    row = read_conversation(
        [user("Hi"), answer("Hello.", token_ids=written[0]), user("More"), answer("Two", token_ids=written[1])]
    )
    for n, (ids, mask) in zip((1, 3), render_documents(r1, row)):
        prompt = prompt_ids(r1, row.messages[:n])
        assert ids == prompt + written[n // 2] and mask == [False] * len(prompt) + [True] * len(written[n // 2])


def test_special_tokens_that_the_target_itself_wrote_are_trained_on():
    llama = tokenizer_of("llama3")
    written = llama.encode("<|python_tag|>print(1)<|eom_id|>")
    row = read_conversation([user("Hi"), answer("<|python_tag|>print(1)", token_ids=written)])
    assert trained(llama, row) == [["<|python_tag|>print(1)<|eom_id|>"]]
    with pytest.raises(Unrenderable, match="special token"):
        render_documents(llama, read_conversation([user("<|python_tag|>"), answer("No", token_ids=written)]))


# properties

PIECES = st.sampled_from(
    ["\n", "\n\n", " ", "  ", "\t", "Hello", "Answer:\n", "User:\n", "assistant", "<think>", "|>", "é"]
)
LETTERS = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters="\u2581\u00a0\u3000")
TEXTS = st.lists(PIECES | st.text(LETTERS, max_size=8), min_size=1, max_size=5).map("".join)
TEXTS = TEXTS.filter(lambda text: "</think>" not in text)  # templates of thinking models split an answer there


@st.composite
def conversations(draw, answers=TEXTS) -> Conversation:
    messages = [turn("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXTS)), answer(draw(answers.filter(str.strip)))]
    return read_conversation(messages, truncated=draw(st.booleans()))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek_r1"])
@settings(max_examples=60, deadline=None)
@given(conversations())
def test_the_trained_text_is_the_answers_whatever_they_are(family, row):
    """And what stands before each answer is, token for token, the prompt that generation and evaluation use."""
    tokenizer, kind = tokenizer_of(family), FAMILIES[family]
    answers = [i for i, m in enumerate(row.messages) if m["role"] == "assistant"]
    expected = [kind.opens + kind.writes(row.messages[i]["content"]) + kind.ends for i in answers]
    if row.truncated:
        expected[-1] = expected[-1].removesuffix(kind.ends)
    documents = render_documents(tokenizer, row)
    assert [text for d in documents for text in trained_texts(tokenizer, d)] == expected
    starts = [(ids, i) for ids, mask in documents for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    for turn_index, (ids, start) in zip(answers, starts, strict=True):
        assert ids[:start] == prompt_ids(tokenizer, row.messages[:turn_index])


@pytest.mark.parametrize("family", ["chatml", "llama3", "command_r", "kimi"])
@settings(max_examples=40, deadline=None)
@given(conversations())
def test_tokenising_in_parts_gives_what_tokenising_at_once_gives(family, row):
    tokenizer = tokenizer_of(family)
    assert ChatTemplate(tokenizer).isolates(FAMILIES[family].ends)
    in_parts = render_documents(tokenizer, row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "isolates", lambda self, text: False)
        assert render_documents(tokenizer, row) == in_parts


@pytest.mark.parametrize("family", MARKED)
@settings(max_examples=100, deadline=None)
@given(conversations(answers=TEXTS.map(lambda text: f"So {text}.")))
def test_the_mask_of_marked_templates_is_the_one_that_transformers_finds(family, row):
    tokenizer = tokenizer_of(family, marked=True)
    row = Conversation(row.messages)
    theirs = tokenizer.apply_chat_template(
        row.messages, return_dict=True, return_assistant_tokens_mask=True, strftime_now=TODAY.strftime
    )
    ids, mask = only(tokenizer, row)
    assert ids == theirs["input_ids"][: len(ids)]
    assert [int(on) for on in mask] == theirs["assistant_masks"][: len(mask)]
    assert not any(theirs["assistant_masks"][len(mask) :])


def test_markers_decide_whether_the_end_of_turn_is_trained_on():
    row = talk("Hi", "One two.", "More", "Three.")
    assert trained(tokenizer_of("chatml", True), row) == [["One two.<|im_end|>", "Three.<|im_end|>"]]
    assert trained(tokenizer_of("llama3", True), row) == [["One two.", "Three."]]
    assert trained(tokenizer_of("gemma", True), row) == [["One two.<end_of_turn>\n", "Three.<end_of_turn>\n"]]
    cut = talk("Hi", "One tw", cut=True)
    assert [trained(tokenizer_of(name, True), cut) for name in MARKED] == [[["One tw"]]] * 3


def test_every_byte_of_a_last_letter_is_trained_on():
    """Where transformers, which asks for the one token of a letter, leaves the letter's later bytes out."""
    llama = tokenizer_of("llama3", marked=True)
    assert trained(llama, talk("Hi", "Off \U0001f680")) == [["Off \U0001f680"]]


def test_markers_that_leave_an_answer_out_are_a_reason():
    from_the_second = MARKED["chatml"].replace(
        "if m.role == 'assistant' %}", "if m.role == 'assistant' and not loop.last %}"
    )
    other = with_template(tokenizer_of("chatml"), from_the_second)
    with pytest.raises(Unrenderable, match="markers leave this answer out"):
        render_documents(other, talk("Hi", "One"))
