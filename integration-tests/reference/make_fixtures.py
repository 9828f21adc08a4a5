"""Writes the Mixtral reference fixtures that the Java tests compare against.

    pip install "torch==2.13.0+cpu" transformers==5.18.0 safetensors
    python3 integration-tests/reference/make_fixtures.py

Everything follows from SEED. The result is committed; run this only to change it.
"""

import json
import shutil
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "integration-tests/src/test/resources/fixtures/mixtral-tiny"
SMALL = ROOT / "djl-moe-memory/src/test/resources/safetensors"
SEED = 134
WINDOW = 5
SHAPE = (2, 11)
IGNORE = -100
MIN_MARGIN = 1e-3


def make_config(window=None):
    return MixtralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        rope_theta=10000.0,
        sliding_window=window,
        dtype="float32",
        attn_implementation="eager",
        experts_implementation="eager",
    )


def make_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    model = MixtralForCausalLM(make_config())
    weights = {}
    for name, value in sorted(model.state_dict().items()):
        noise = torch.randn(value.shape, generator=generator)
        norm = name.endswith("norm.weight")
        # A wide router and norms other than one, so that routing is decisive and every
        # factor shows in the result.
        weights[name] = (1 + 0.2 * noise) if norm else 0.2 * noise
    ids = torch.randint(0, 97, SHAPE, generator=generator)
    return weights, ids


def make_model(weights, window=None):
    model = MixtralForCausalLM(make_config(window))
    model.load_state_dict(weights)
    return model.eval()


def run(model, ids, labels=None):
    """Logits, loss, chosen experts per layer [tokens, k], smallest margin of the choice."""
    scores = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, i, o: scores.append(o))
        for layer in model.model.layers
    ]
    out = model(input_ids=ids, labels=labels, use_cache=False)
    for hook in hooks:
        hook.remove()
    margin = 1.0
    for logits, _, _ in scores:
        p = logits.detach().softmax(-1).sort(-1, descending=True).values
        margin = min(margin, (p[:, :2] - p[:, 1:3]).min().item())
    return out.logits, out.loss, [chosen for _, _, chosen in scores], margin


def shift(labels):
    """What position t has to predict: transformers shifts inside its loss, ours does not."""
    target = torch.full_like(labels, IGNORE)
    target[:, :-1] = labels[:, 1:]
    return target


def reference(weights, ids, labels, window):
    model = make_model(weights, window)
    logits, loss, routing, margin = run(model, ids, labels)
    loss.backward()
    tensors = {
        "input_ids": ids,
        "labels": labels,
        "target_ids": shift(labels),
        "logits": logits,
        "loss": loss.reshape(1),
    }
    own = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), shift(labels).flatten(), ignore_index=IGNORE
    )
    assert abs(own.item() - loss.item()) < 1e-6, "mean over the valid targets"
    for i, chosen in enumerate(routing):
        tensors[f"routing.{i}"] = chosen
    for name, parameter in model.named_parameters():
        tensors["grad." + name] = parameter.grad
    return {k: v.detach().contiguous() for k, v in tensors.items()}, margin


def per_expert(weights):
    """The stacked weights as other families name them on disk."""
    result = {}
    for name, value in weights.items():
        for e in range(value.shape[0]):
            if name.endswith("experts.gate_up_proj"):
                prefix = name.replace("gate_up_proj", f"{e}.")
                gate, up = value[e].chunk(2)
                result[prefix + "gate_proj.weight"] = gate.contiguous()
                result[prefix + "up_proj.weight"] = up.contiguous()
            elif name.endswith("experts.down_proj"):
                prefix = name.replace("down_proj", f"{e}.")
                result[prefix + "down_proj.weight"] = value[e].contiguous()
        if ".experts." not in name:
            result[name] = value
    return result


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def save(model, folder, **kwargs):
    model.save_pretrained(folder, **kwargs)
    (folder / "generation_config.json").unlink(missing_ok=True)


def write_small():
    """A file by the reference implementation with every kind of tensor the reader must know."""
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn(5, 7, generator=generator)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-7, 65504.0, 1e-40])
    tensors = {
        "f32": values,
        "f32.special": special,
        "f64": values.double() / 3,
        "f64.expected": (values.double() / 3).float(),
        "i64": torch.arange(6).reshape(2, 3),
        "u8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        for name, value in (("", values), (".special", special)):
            tensors[kind + name] = value.to(dtype)
            tensors[kind + name + ".expected"] = value.to(dtype).float()
    save_file(tensors, fresh(SMALL) / "python.safetensors", metadata={"note": "ü"})


def main():
    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    weights, ids = make_weights(SEED)
    fresh(OUT)
    model = make_model(weights)

    save(model, OUT / "f32")
    save(model, OUT / "fused", save_original_format=False)
    save(model, OUT / "sharded", max_shard_size="64KB")
    save(model, OUT / "per-expert")
    save_file(
        per_expert(weights), OUT / "per-expert/model.safetensors", metadata={"format": "pt"}
    )
    margins = {}
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        narrow = make_model(weights).to(dtype)
        save(narrow, OUT / kind)
        wide = make_model({k: v.float() for k, v in narrow.state_dict().items()})
        with torch.no_grad():
            logits, _, _, margins[kind] = run(wide, ids)
        save_file(
            {"input_ids": ids, "logits": logits.contiguous()},
            OUT / kind / "reference.safetensors",
        )

    all_valid = ids.clone()
    some = ids.clone()
    some[0, :3] = IGNORE
    some[0, 6] = IGNORE
    some[1, 8:] = IGNORE
    references = {
        "reference": (some, None),
        "reference-window": (some, WINDOW),
        "reference-all-valid": (all_valid, None),
    }
    made = {}
    for name, (labels, window) in references.items():
        made[name], margins[name] = reference(weights, ids, labels, window)
        save_file(made[name], OUT / f"{name}.safetensors")
    save_config = make_config(WINDOW)
    save_config.architectures = ["MixtralForCausalLM"]
    save_config.save_pretrained(OUT / "window-config")

    # The window counts the token itself: position WINDOW is the first that loses a key.
    change = (made["reference"]["logits"] - made["reference-window"]["logits"]).abs().amax((0, 2))
    assert change[:WINDOW].max() < 1e-6 and change[WINDOW:].min() > 1e-4, change
    assert min(margins.values()) > MIN_MARGIN, margins

    # What was saved is what transformers loads.
    for kind in ("f32", "fused", "sharded"):
        loaded = MixtralForCausalLM.from_pretrained(OUT / kind, attn_implementation="eager")
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, weights[name]), (kind, name)
    assert load_file(OUT / "f32/model.safetensors").keys() != weights.keys()

    write_small()
    for path in [*OUT.rglob("*.safetensors"), *SMALL.glob("*.safetensors")]:
        path.chmod(0o644)
    (OUT / "README.md").write_text(readme(margins, made))
    print(json.dumps(margins, indent=1))


def readme(margins, made):
    rows = "\n".join(f"| {name} | {value:.2e} |" for name, value in margins.items())
    losses = "\n".join(
        f"| {name} | {value['loss'].item():.7f} |" for name, value in made.items()
    )
    return f"""# A tiny random Mixtral and what it computes

Written by `integration-tests/reference/make_fixtures.py` (seed {SEED}) with torch {torch.__version__},
transformers {transformers.__version__}, safetensors {safetensors.__version__}; eager attention, eager experts, float32, evaluation mode.

Vocabulary 97, hidden 32, expert width 24, 2 layers, 4 query and 2 key/value heads of width 8, 6 experts,
top-2, rope base 10000. Weights are normal with deviation 0.2, norms 1 + that.

| folder | weights |
|---|---|
| `f32` | one file, `block_sparse_moe.experts.M.w1/w3/w2` (what `save_pretrained` writes) |
| `per-expert` | one file, `mlp.experts.M.gate_proj/up_proj/down_proj` |
| `fused` | one file, `mlp.experts.gate_up_proj` and `down_proj` |
| `sharded` | as `f32`, in several files with an index |
| `f16`, `bf16` | as `f32`, rounded; `reference.safetensors` in them has the logits of the rounded weights, computed in float32 |
| `window-config` | the configuration with `sliding_window` {WINDOW}, no weights |

`reference*.safetensors` hold, for the F32 weights: `input_ids` and `labels` {list(SHAPE)}; `target_ids`, the labels shifted
by one as transformers does inside its loss (last position {IGNORE}); `logits`; `loss` [1], the mean over the valid targets;
`routing.L` [tokens, 2], the experts of layer L in order of probability; and `grad.NAME` for every parameter, experts stacked.
`reference` has some labels {IGNORE}, `reference-all-valid` none, `reference-window` is `reference` with `sliding_window` {WINDOW}:
a token attends to {WINDOW} positions, itself included (the script checks that logits change from position {WINDOW} on and not before).

Smallest distance between neighbouring probabilities among first, second and third expert (nothing is near a tie):

| run | margin |
|---|---|
{rows}

| run | loss |
|---|---|
{losses}
"""


if __name__ == "__main__":
    main()
