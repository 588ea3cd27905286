"""The sampling of a measurement: temperatures alone, or those of the target's own generation_config.json."""

from __future__ import annotations

import re

from ..common import BadInputError
from ..decode import Sampling
from ..recipes import EvalSpec
from ..targets import Target

# Keys of a generation config that change no distribution: lengths, ends, caches, outputs, how `generate` drafts.
_HARMLESS = re.compile(
    "assistant_|bos_|cache_|compile_|continuous_|decoder_start|disable_compile|do_sample|eos_|length_penalty|max_|"
    "num_assistant|num_return|output_|pad_|prefill_chunk|prompt_lookup|remove_invalid|renormalize|return_dict|"
    "transformers_version|use_|_from"
)
_NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "typical_p": 1, "encoder_repetition_penalty": 1, "guidance_scale": 1}
_NEUTRAL |= dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "early_stopping"), 0)
_NEUTRAL |= dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), 0)
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_ALWAYS = {"repetition_penalty": "repetition_penalty", "min_new_tokens": "min_new_tokens"}
_TOKENS = {"suppress_tokens": "suppress", "bad_words_ids": "bad_words"}


def base_sampling(target: Target, settings: EvalSpec) -> Sampling:
    """Return how tokens are drawn, with the temperature of the target's own config under `eval.sampling: served`.

    Raises:
        BadInputError: the config asks for something that our decoder does not do; names it.
    """
    if settings.sampling == "temperatures":
        return Sampling(seed=settings.seed)
    own = getattr(target.model, "generation_config", None)
    values = {} if own is None else own.to_diff_dict()
    values = {k: v for k, v in values.items() if v is not None and v != _NEUTRAL.get(k)}
    known = (*_SAMPLED, *_ALWAYS, *_TOKENS)
    if others := sorted(k for k in values if k not in known and not _HARMLESS.match(k)):
        raise BadInputError(
            "eval.sampling: served takes the target's generation_config.json, which asks for "
            f"{', '.join(f'{k}={values[k]!r}' for k in others)}; our decoder does not do that. Measure with "
            "eval.sampling=temperatures, or remove it from a copy of the config."
        )
    made = {ours: values[k] for k, ours in _ALWAYS.items() if k in values}
    made |= {ours: tuple(map(_frozen, values[k])) for k, ours in _TOKENS.items() if k in values}
    if values.get("do_sample"):
        made |= {"temperature": 1.0} | {k: values[k] for k in _SAMPLED if k in values}
        made["top_k"] = made.get("top_k") or None  # 0 keeps all tokens
    return Sampling(seed=settings.seed, **made)


def _frozen(value: int | list[int]) -> int | tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else value


def sampled_settings(target: Target, settings: EvalSpec) -> EvalSpec:
    """Return the settings with the one temperature at which the target is served, if that is asked for."""
    if settings.sampling == "temperatures":
        return settings
    return settings.model_copy(update={"temperatures": [float(base_sampling(target, settings).temperature)]})
