"""Conversations as training data: masks of answers, what is left out, packing, and the loss."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.data import made_tokenizers
from tests.data.chat_templates import FAMILIES, TALK, files_of
from tests.tiny_runs import rough_params, tiny_config
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data.chat.conversations import chains, example_of, parts_of, turns_of
from xfresearch.data.chat.templates import Template
from xfresearch.data.pipeline import Batches, prepare
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.options.objectives import Chat
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError
from xfresearch.training.step import make_loss, totals_of


@pytest.fixture
def tokenizer_of(tmp_path):
    def make(family, **more):
        made_tokenizers.write(tmp_path / "tokenizer", files_of(family, **more))
        return load_tokenizer(tmp_path / "tokenizer")

    return make


@pytest.fixture
def config_of(tmp_path, tokenizer_of):
    """config_of(family, rows, ...): a run's config whose corpus has these rows in both splits."""

    def make(family, rows, sequence_length=128, **chosen):
        tokenizer_of(family)
        for split in ("train", "validation"):
            text = "\n".join(map(json.dumps, rows))
            (tmp_path / "rows").mkdir(exist_ok=True)
            (tmp_path / "rows" / f"{split}.jsonl").write_text(text)
        data = DataConfig(
            corpus=(str(tmp_path / "rows"),), cache_dir=str(tmp_path / "cache"), packing="documents",
            tokenizer=str(tmp_path / "tokenizer"), objective=Chat(**chosen),
        )  # fmt: skip
        base = tiny_config("llama")
        return replace(base, data=data, sequence_length=sequence_length, batch_size=2)

    return make


def examples_of(tokenizer, messages, today="2024-07-26", **more):
    template = Template.of(tokenizer.files)
    texts = template.texts([{"messages": messages, **more}], [parts_of(messages)], today)[0]
    assert not isinstance(texts, str), texts
    return [example_of(chain, tokenizer, template.file, "x:1") for chain in chains(turns_of(texts))]


def read(tokenizer, ids) -> str:
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    return "".join(names.get(int(i)) or tokenizer.decode_bytes([i]).decode() for i in ids)


ANSWERS = {  # the predicted text of each example
    "llama 3.1": ["Yes.<|eot_id|>the\nend<|eot_id|>"],
    "qwen3": ["<think>\n\n</think>\n\nYes.<|im_end|>", "<think>\n\n</think>\n\nthe\nend<|im_end|>"],
    "gemma 3": ["Yes.<end_of_turn>the\nend<end_of_turn>"],
    "gpt-oss": [
        "<|channel|>final<|message|>Yes.<|return|>",
        "<|channel|>final<|message|>the\nend<|return|>",
    ],
    "mistral": [" Yes.</s> the\nend</s>"],
}
READ = {  # the text of the last example that is not predicted
    "llama 3.1": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nthe one?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "<|start_header_id|>user<|end_header_id|>\n\na two<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3": "<|im_start|>user\nthe one?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    "<|im_start|>user\na two<|im_end|>\n<|im_start|>assistant\n",
    "gemma 3": "<bos><start_of_turn>user\nthe one?<end_of_turn>\n<start_of_turn>model\n\n<start_of_turn>user\na two"
    "<end_of_turn>\n<start_of_turn>model\n",
    "gpt-oss": "<|start|>system<|message|>Current date: 2024-07-26<|end|><|start|>user<|message|>the one?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>a two<|end|><|start|>assistant",
    "mistral": "[INST]the one?[/INST][INST]a two[/INST]",
}


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_and_the_tokens_that_end_them_are_predicted(tokenizer_of, name, place):
    tokenizer = tokenizer_of(FAMILIES[name], place=place)
    examples = examples_of(tokenizer, TALK)
    assert len(examples) == (1 if FAMILIES[name].joined else 2)
    assert [read(tokenizer, each.ids[each.predicted]) for each in examples] == ANSWERS[name]
    assert read(tokenizer, examples[-1].ids[~examples[-1].predicted]) == READ[name]
    assert examples[-1].predicted[-1] and examples[-1].ids[-1] in tokenizer.stops


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_before_an_answer_is_what_a_model_is_asked_with(tokenizer_of, name):
    """The tokens before the first answer of an example are those of `lm.chat`."""
    from xfresearch.data.chat.templates import render

    tokenizer = tokenizer_of(FAMILIES[name])
    example = examples_of(tokenizer, TALK[:2])[0]
    before = example.ids[: np.argmax(example.predicted)]
    assert before.tolist() == tokenizer.encode_special(render(tokenizer.files, TALK[:1]).replace(*_today(name)))


def _today(name: str) -> tuple[str, str]:
    from datetime import datetime

    form = {"llama 3.1": "%d %b %Y"}.get(name, "%Y-%m-%d")
    return datetime.now().strftime(form), datetime(2024, 7, 26).strftime(form)


def test_a_system_message_that_moves_to_the_last_question_gives_each_answer_its_own_example(tokenizer_of):
    """As Mistral's. The answer before it stays, and is not predicted again."""
    examples = examples_of(tokenizer_of(FAMILIES["mistral"]), [{"role": "system", "content": "S"}, *TALK])
    tokenizer = tokenizer_of(FAMILIES["mistral"])
    assert [read(tokenizer, each.ids) for each in examples] == [
        "[INST]S\n\nthe one?[/INST] Yes.</s>",
        "[INST]the one?[/INST] Yes.</s>[INST]S\n\na two[/INST] the\nend</s>",
    ]
    assert read(tokenizer, examples[1].ids[examples[1].predicted]) == " the\nend</s>"


def test_thoughts_and_tools_are_rendered_where_the_template_takes_them(tokenizer_of, config_of):
    tokenizer = tokenizer_of(FAMILIES["gpt-oss"])
    talk = [TALK[0], {"role": "assistant", "thinking": "a", "content": "Yes."}]
    (example,) = examples_of(tokenizer, talk)
    expected = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert read(tokenizer, example.ids[example.predicted]) == expected
    rows = [{"messages": TALK, "tools": json.dumps([{"name": "f"}])}]
    config = config_of(FAMILIES["llama 3.1"], rows)
    tokens_L = prepare(config, "train").read([0])["tokens"][0]
    assert '"name": "f"' in read(load_tokenizer(config.data.tokenizer), tokens_L)
    with pytest.raises(UserError, match="jsonl:1: has tools, which the chat template of chat_template.jinja does not"):
        prepare(config_of(FAMILIES["gemma 3"], rows), "train")


PREFIXLESS = FAMILIES["qwen3"]._replace(  # as DeepSeek-R1: it asks for a thought, and then leaves it out
    template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ENDLESS = FAMILIES["gemma 3"]._replace(end="<|im_end|>")


@pytest.mark.parametrize(
    "family, messages, words",
    [
        (PREFIXLESS, TALK, "no mask of answers: the text with an answer does not begin with the text that asks for it .*:1"),
        (ENDLESS, TALK, r"no token ends an answer, whose text ends with 'Yes.<end_of_turn>\\n' .*eos_token"),
        (FAMILIES["gemma 3"], TALK[1:], r"cannot be rendered: Conversation roles must alternate .*train.jsonl:1"),
        (FAMILIES["gemma 3"], [], "field 'messages' has no messages"),
        (FAMILIES["gemma 3"], [{"from": "human", "value": "a"}], "field 'messages' has no messages: they must be"),
        (FAMILIES["gemma 3"], TALK[:1], "train: no conversation has an answer"),
    ],
)
def test_what_has_no_mask_is_refused_by_name(config_of, family, messages, words):
    with pytest.raises(UserError, match=words) as error:
        prepare(config_of(family, [{"messages": messages}]), "train")
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_template_is_refused(config_of, tmp_path):
    config = config_of(FAMILIES["gemma 3"], [{"messages": TALK}])
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        prepare(config, "train")


def test_a_tokenizer_that_reads_a_piece_in_another_way_is_refused(tmp_path):
    """Llama 2's puts a space before each piece."""
    files = {"tokenizer.json": made_tokenizers.byte_fallback(), "tokenizer_config.json": '{"eos_token": "</s>"}'}
    made_tokenizers.write(tmp_path, files | {"chat_template.jinja": FAMILIES["mistral"].template})
    with pytest.raises(UserError, match="answers cannot be cut from their prompts: the tokenizer reads a part"):
        examples_of(load_tokenizer(tmp_path), TALK)


def test_what_is_left_out_is_counted(config_of):
    long = [TALK[0], {"role": "assistant", "content": "x" * 200}]
    empty = [TALK[0], {"role": "assistant", "content": " ", "tool_calls": None}]
    rows = [{"messages": TALK}, {"messages": long}, {"messages": empty}, {"messages": TALK[:1]}]
    rows.append({"prompt": "the", "completion": "a"})
    rows.append({"prompt": "the", "completion": ""})
    split = prepare(config_of(FAMILIES["gemma 3"], rows), "train")
    counted = {name: split.meta[name] for name in ("n_conversations", "n_examples", "n_longer", "n_empty", "n_predicted")}
    predicted = len("Yes.") + 1 + len("the\nend") - 2 + 1 + len("a") + 1  # 'the' is one token
    assert counted == {"n_conversations": 2, "n_examples": 2, "n_longer": 1, "n_empty": 3, "n_predicted": predicted}
    assert split.read(range(len(split)))["weights"].sum() == predicted


def test_prompts_and_completions_of_other_names_are_conversations(config_of):
    fields = {"prompt_field": "question", "completion_field": "answer"}
    config = config_of(FAMILIES["gemma 3"], [{"question": "the", "answer": "a"}], **fields)
    row = prepare(config, "train").read([0])
    tokenizer = load_tokenizer(config.data.tokenizer)
    assert read(tokenizer, row["targets"][row["weights"] > 0]) == "a<end_of_turn>"
    asked = "<bos><start_of_turn>user\nthe<end_of_turn>\n<start_of_turn>model\n"
    assert read(tokenizer, row["tokens"][row["segments"] > 0]) == f"{asked}a"


def test_the_loss_and_the_gradient_are_those_of_a_mask_made_by_hand(config_of):
    """Two conversations in a row: their loss is that of each one alone, over the tokens of its answer."""
    rows = [{"prompt": "the one", "completion": "Yes."}, {"prompt": "a", "completion": "the end"}]
    config = config_of(FAMILIES["gemma 3"], rows)
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = replace(config.model, vocab_size=tokenizer.vocab_size)
    params = rough_params(model)
    batch = prepare(config, "train").read([0])
    for number in (1, 2):
        places = batch["segments"] == number
        np.testing.assert_array_equal(batch["positions"][places], np.arange(places.sum()))

    def by_hand(params):
        """Each conversation alone, without padding: the mean over the tokens of both answers."""
        total, count = 0.0, 0
        for each in rows:
            asked = f"<bos><start_of_turn>user\n{each['prompt']}<end_of_turn>\n<start_of_turn>model\n"
            asked, answer = map(tokenizer.encode_special, (asked, f"{each['completion']}<end_of_turn>"))
            ids_1L = np.array([asked + answer])
            network = transformer.bind(model, params)
            out = network(ids_1L, Context(np.arange(ids_1L.size)[None]))
            log_p_LV = jax.nn.log_softmax(network.logits(out.hidden_BLD))[0]
            places = np.arange(len(asked), len(asked) + len(answer))
            total -= log_p_LV[places - 1, ids_1L[0, places]].sum()
            count += len(answer)
        return total / count

    loss, gradient = jax.value_and_grad(by_hand)(params)
    trained = make_loss(replace(config, model=model))
    totals = totals_of(batch)
    (packed, _), packed_gradient = jax.value_and_grad(trained, has_aux=True)(params, {}, batch, jax.random.key(0), totals)
    assert relative_error(packed, loss) < TOLERANCE["float32"]
    errors = jax.tree.map(relative_error, packed_gradient, gradient)
    assert max(jax.tree.leaves(errors)) < TOLERANCE["float32"]


def test_rows_of_training_and_of_evaluation_have_the_same_weights(config_of):
    """A batch of training is rows of the split, in an order of the seed."""
    rows = [{"prompt": f"number {number}", "completion": "the"} for number in range(30)]
    config = config_of(FAMILIES["gemma 3"], rows)
    split, batches = prepare(config, "train"), Batches(config)
    assert len(split) > 2 and not (split.read(range(len(split)))["weights"] > 0).all()
    rows = {each.tobytes() for each in split.read(range(len(split)))["weights"]}
    assert all(each.tobytes() in rows for each in batches.batch(0)["weights"])
