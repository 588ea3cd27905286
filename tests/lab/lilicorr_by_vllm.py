"""What vLLM's own LiLiCorr computes from an exported drafter, on a CPU. Run in an environment with vLLM:

python lilicorr_by_vllm.py FOLDER INPUTS OUT

Inputs are the target's `embedding` and `output` tables, states of drafts and anchors. Out are the candidates of each
draft, as vLLM's head of the vocabulary finds them, and their scores after each candidate of the draft before.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel


def computed(folder: Path, given: dict) -> dict:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.models.lilicorr import LiLiCorrHead
    from vllm.model_executor.models.utils import AutoWeightsLoader

    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    vocab, size = given["embedding"].shape
    embedding, output = VocabParallelEmbedding(vocab, size), ParallelLMHead(vocab, size)
    for module, name in ((embedding, "embedding"), (output, "output")):
        module.weight_loader(module.weight, given[name])
    block, epsilon = config["block_size"], config["rms_norm_eps"]
    head = LiLiCorrHead(model_hidden_size=size, block_size=block, rms_norm_eps=epsilon, config=config["dflash_config"])
    own = {name.removeprefix("lilicorr."): t for name, t in weights.items() if name.startswith("lilicorr.")}
    assert AutoWeightsLoader(head).load_weights(own.items()) == {name for name, _ in head.named_parameters()}
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    for module in (output, *head.modules()):
        if hasattr(module, "quant_method"):  # as the loader does, for the CPU's products
            module.quant_method.process_weights_after_loading(module)
    states, anchors = given["states"], given["anchors"]
    ids, log_probs = LogitsProcessor(vocab).get_top_k_tokens(
        output, states.flatten(0, 1), head.candidate_topk, return_log_probs=True
    )
    ids, log_probs = (x.view(*states.shape[:2], -1) for x in (ids, log_probs))
    valid = torch.ones(len(states), dtype=torch.bool)
    return {"candidates": ids, "scores": head(embedding(ids), log_probs, states, anchors, valid)}


@torch.no_grad()
def main(folder: str, inputs: str, out: str) -> None:
    config = VllmConfig(compilation_config=CompilationConfig(mode=0))
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as place:
        init_distributed_environment(1, 0, f"file://{place}/begin", 0, "gloo")
        initialize_model_parallel(1, 1)
        found = computed(Path(folder), load_file(inputs))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
