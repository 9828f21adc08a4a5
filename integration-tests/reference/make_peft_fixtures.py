"""Writes the adapters that the Java tests compare with PEFT, and has PEFT load ours.

    pip install "torch==2.13.0+cpu" transformers==5.18.0 peft==0.21.0 safetensors
    python3 integration-tests/reference/make_peft_fixtures.py

Needs fixtures/mixtral-tiny (make_fixtures.py) and fixtures/peft/ours, which the Java class PeftFixture
writes. Everything else follows from SEED. The result is committed; run this only to change it.
"""

import json

import peft
import torch
import transformers
from make_fixtures import ROOT, fresh, make_config, make_model, make_weights
from make_fixtures import SEED as BASE_SEED
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM

OUT = ROOT / "integration-tests/src/test/resources/fixtures/peft"
SEED = 77
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def reference(base, folder, ids):
    """Logits of the base model under the adapter of a folder; checks that it matters and merges."""
    plain = logits(base(), ids)
    model = PeftModel.from_pretrained(base(), folder).eval()
    with_adapter = logits(model, ids)
    merged = logits(model.merge_and_unload(), ids)
    assert (with_adapter - plain).abs().max() > 0.05, folder
    error = (merged - with_adapter).norm() / with_adapter.norm()
    assert error < 1e-5, (folder, error)
    save_file(
        {"input_ids": ids, "base": plain, "logits": with_adapter.contiguous()},
        folder / "reference.safetensors",
    )
    return error.item()


def randomize(model, generator):
    for name, value in sorted(model.named_parameters()):
        if value.requires_grad:
            noise = torch.randn(value.shape, generator=generator)
            value.data = value.data + 0.1 * noise if "gate" in name else 0.2 * noise


def clean(folder):
    (folder / "README.md").unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def stacked(base, folder, generator, **options):
    options = {"target_parameters": STACKED, **options}
    config = LoraConfig(target_modules=[], task_type="CAUSAL_LM", **options)
    model = get_peft_model(base(), config)
    randomize(model, generator)
    model.save_pretrained(fresh(folder))


def per_expert(folder, generator):
    """As PEFT wrote it while experts were linear layers of their own.."""
    rank, tensors = 3, {}
    for layer in range(2):
        for e in range(6):
            for name, width, out in (("w1", 32, 24), ("w2", 24, 32), ("w3", 32, 24)):
                at = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{e}.{name}"
                for side, shape in (("A", (rank, width)), ("B", (out, rank))):
                    value = 0.2 * torch.randn(shape, generator=generator)
                    tensors[f"{at}.lora_{side}.weight"] = value
    save_file(tensors, fresh(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(r=rank, lora_alpha=4, target_modules=["w1", "w2", "w3"], task_type="CAUSAL_LM")
    config.inference_mode = True
    config.save_pretrained(folder)


def main():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    weights, ids = make_weights(BASE_SEED)

    def base():
        return make_model(weights)

    errors = {"ours": reference(base, OUT / "ours", ids)}

    stacked(base, OUT / "stacked", generator, r=4, lora_alpha=6, modules_to_save=["gate"])
    errors["stacked"] = reference(base, OUT / "stacked", ids)

    stacked(base, OUT / "down-only", generator, r=2, lora_alpha=3, use_rslora=True, target_parameters=STACKED[1:])
    errors["down-only"] = reference(base, OUT / "down-only", ids)

    per_expert(OUT / "per-expert", generator)
    errors["per-expert"] = reference(base, OUT / "per-expert", ids)
    model = PeftModel.from_pretrained(base(), OUT / "per-expert")
    model.save_pretrained(fresh(OUT / "converted"))
    errors["converted"] = reference(base, OUT / "converted", ids)
    one, other = (load_file(OUT / f / "reference.safetensors")["logits"] for f in ("per-expert", "converted"))
    assert torch.equal(one, other)

    # Hidden width = 2 x expert width: gate_up_proj is square, and both B have the same shape.
    square = make_config()
    square.hidden_size, square.intermediate_size = 16, 8
    square.num_hidden_layers, square.num_local_experts = 1, 3
    torch.manual_seed(SEED)
    small = MixtralForCausalLM(square).eval()
    for _, value in sorted(small.named_parameters()):
        value.data = 0.3 * torch.randn(value.shape, generator=generator)
    small.save_pretrained(fresh(OUT / "square-base"))
    (OUT / "square-base/generation_config.json").unlink(missing_ok=True)

    def square_base():
        return MixtralForCausalLM.from_pretrained(
            OUT / "square-base", attn_implementation="eager", experts_implementation="eager"
        ).eval()

    stacked(square_base, OUT / "square", generator, r=2, lora_alpha=5)
    errors["square"] = reference(square_base, OUT / "square", ids)

    for folder in OUT.iterdir():
        if folder.is_dir():
            clean(folder)
    rows = "\n".join(f"| {name} | {error:.1e} |" for name, error in errors.items())
    (OUT / "README.md").write_text(README.format(rows=rows))
    print(json.dumps(errors, indent=1))


README = f"""# Adapters, and what PEFT makes of them

`ours` was written by the Java class `PeftFixture`; everything else by
`integration-tests/reference/make_peft_fixtures.py` (seed {SEED}) with torch {torch.__version__}, transformers {transformers.__version__},
peft {peft.__version__}. `reference.safetensors` in each folder has `input_ids`, `base`, the logits of the base model, and
`logits`, those under the adapter, loaded by `PeftModel.from_pretrained`; eager attention and experts, float32.

| folder | adapter | base |
|---|---|---|
| `ours` | written by this library: stacked, r 4, alpha 6, routers in full | `mixtral-tiny/f32` |
| `stacked` | stacked, r 4, alpha 6, routers in full (`modules_to_save`) | `mixtral-tiny/f32` |
| `down-only` | stacked, `down_proj` alone, r 2, scaled by alpha / sqrt(r) | `mixtral-tiny/f32` |
| `per-expert` | `experts.M.w1/w2/w3`, r 3, as of transformers 4 | `mixtral-tiny/f32` |
| `converted` | `per-expert`, saved again by PEFT: stacked, with `rank_pattern` and `alpha_pattern` | `mixtral-tiny/f32` |
| `square` | stacked, r 2 | `square-base`: 3 experts, hidden 16 = 2 x expert width 8 |

PEFT's own merged model against the unmerged one, relative error of the logits:

| folder | error |
|---|---|
{{rows}}
"""


if __name__ == "__main__":
    main()
