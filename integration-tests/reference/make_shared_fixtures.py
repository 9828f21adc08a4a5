"""Writes the reference fixtures of models with shared experts and balancing biases.

    pip install "torch==2.13.0+cpu" transformers==5.18.0 safetensors
    python3 integration-tests/reference/make_shared_fixtures.py

No architecture of transformers has all that ours has, so there are two, each computed by the code of
transformers: a Qwen2-MoE without attention biases whose weights are divided by their sum (gated shared
experts), and a Mixtral whose feed-forward layers are those of ERNIE 4.5 (balancing biases, ungated shared
experts). Everything follows from the seeds. The result is committed; run this only to change it.
"""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock

from make_fixtures import IGNORE, MIN_MARGIN, ROOT, SHAPE, fresh, make_config, per_expert, shift

OUT = ROOT / "integration-tests/src/test/resources/fixtures/shared-tiny"
SEED = 135
# one without choices near a tie
BIASED_SEED = 138
SHARED = 40
BIAS = "e_score_correction_bias"


def gated():
    sizes = make_config()
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            moe_intermediate_size=sizes.intermediate_size,
            shared_expert_intermediate_size=SHARED,
            num_hidden_layers=sizes.num_hidden_layers,
            num_attention_heads=sizes.num_attention_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            num_experts=sizes.num_local_experts,
            num_experts_per_tok=sizes.num_experts_per_tok,
            max_position_embeddings=sizes.max_position_embeddings,
            rms_norm_eps=sizes.rms_norm_eps,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
            norm_topk_prob=True,
            qkv_bias=False,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )


def biased():
    sizes = make_config()
    model = MixtralForCausalLM(sizes)
    config = Ernie4_5_MoeConfig(
        hidden_size=sizes.hidden_size,
        moe_intermediate_size=sizes.intermediate_size,
        moe_num_experts=sizes.num_local_experts,
        moe_k=sizes.num_experts_per_tok,
        moe_num_shared_experts=2,
        use_bias=False,
        experts_implementation="eager",
    )
    for layer in model.model.layers:
        layer.mlp = Ernie4_5_MoeSparseMoeBlock(config)
    return model


def fill(model, generator):
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.eval()


def our_name(name):
    """The names that the mathematics has in our checkpoints."""
    return name.replace("gate.moe_statics." + BIAS, "gate." + BIAS).replace("shared_experts.", "shared_expert.")


def stacked(gradients):
    """Gradients of gate and up of the shared experts as one, with an axis of experts."""
    result = {}
    for name, value in gradients.items():
        if name.endswith("shared_expert.gate_proj.weight"):
            up = gradients[name.replace("gate_proj", "up_proj")]
            result[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat((value, up))[None]
        elif name.endswith("shared_expert.down_proj.weight"):
            result[name.replace(".weight", "")] = value[None]
        elif not name.endswith("shared_expert.up_proj.weight"):
            result[name] = value
    return result


def run(model, ids, labels):
    """Logits, loss, chosen experts per layer [tokens, k], smallest margin of the choice, choices that the bias moved."""
    scores = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, i, o: scores.append((m, o)))
    out = model(input_ids=ids, labels=labels, use_cache=False)
    margin = 1.0
    moved = 0
    for gate, (logits, _, chosen) in scores:
        p = logits.detach().softmax(-1)
        rank = gate.moe_statics(p) if hasattr(gate, "moe_statics") else p
        top = rank.sort(-1, descending=True).values
        margin = min(margin, (top[:, :2] - top[:, 1:3]).min().item())
        moved += (p.topk(2).indices.sort().values != chosen.sort().values).any(-1).sum().item()
    return out.logits, out.loss, [chosen for _, (_, _, chosen) in scores], margin, moved


def write(folder, seed, model, shared, is_gated, has_bias):
    generator = torch.Generator().manual_seed(seed)
    fill(model, generator)
    ids = torch.randint(0, 97, SHAPE, generator=generator)
    labels = ids.clone()
    labels[0, :3] = IGNORE
    logits, loss, routing, margin, moved = run(model, ids, labels)
    loss.backward()
    assert margin > MIN_MARGIN, margin
    assert (moved > 5) == has_bias, moved
    tensors = {
        "input_ids": ids,
        "target_ids": shift(labels),
        "logits": logits,
        "loss": loss.reshape(1),
    }
    for i, chosen in enumerate(routing):
        tensors[f"routing.{i}"] = chosen
    gradients = {our_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, gradient in stacked(gradients).items():
        tensors["grad." + name] = gradient
    fresh(folder)
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, folder / "reference.safetensors")
    weights = {our_name(n): p.detach() for n, p in model.named_parameters()}
    for name, value in weights.items():
        if name.endswith(BIAS):
            weights[name] = value.reshape(-1).contiguous()
    weights = {k: v.contiguous() for k, v in per_expert(weights).items()}
    if not has_bias:
        # What transformers saves by itself has these names.
        model.save_pretrained(folder)
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == weights.keys(), saved.keys() ^ weights.keys()
        assert all(torch.equal(saved[k], weights[k]) for k in saved)
        (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(make_config().to_json_string())
    config.update(
        architectures=["DjlMoeForCausalLM"],
        model_type="djl_moe",
        shared_expert_intermediate_size=shared,
        shared_expert_gated=is_gated,
        use_routing_bias=has_bias,
        scoring_func="softmax",
        norm_topk_prob=True,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    return f"| `{folder.name}` | {loss.item():.7f} | {margin:.2e} | {moved} of {2 * ids.numel()} |"


def main():
    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    fresh(OUT)
    rows = [
        write(OUT / "gated", SEED, gated(), SHARED, True, False),
        write(OUT / "biased", BIASED_SEED, biased(), 2 * 24, False, True),
    ]
    (OUT / "README.md").write_text(
        f"""# Tiny models with shared experts and balancing biases

Written by `integration-tests/reference/make_shared_fixtures.py` (seeds {SEED} and {BIASED_SEED}) with torch
{torch.__version__}, transformers {transformers.__version__}. Sizes, tensors of `reference.safetensors` and their names are as in
`mixtral-tiny`; `config.json` is of our own model type.

- `gated`: a Qwen2-MoE with `qkv_bias` false and `norm_topk_prob` true, shared experts of width {SHARED} with a gate. The
  script checks that tensors have the names and values that `save_pretrained` writes.
- `biased`: a Mixtral with the feed-forward layers of ERNIE 4.5: balancing biases, two shared experts of width 24
  without a gate. `gate.moe_statics.{BIAS}` [1, E] and `shared_experts` are renamed.

| model | loss | smallest margin of a choice | tokens whose experts the bias changed |
|---|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
