"""The rules about the engine: is it the one that was asked for, on every rank, and was it left to work in peace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isambard_serve.evidence import Measured, Verdict, verdict
from isambard_serve.outputs import BROKEN, broken
from isambard_serve.records import EngineFacts

THERMAL = 0x20 | 0x40
"""NVML's reasons for a low clock that are heat: software and hardware thermal slowdown (nvml.h)."""

POWER_CAP = 0x4
"""NVML's reason for a low clock that is the software power cap (nvml.h)."""

SHOWN = 3
"""How many of many findings are told."""

Names = Sequence[str]


def expected(measured: Measured) -> Verdict:
    """``expected``: the engine is of the recipe's version, and every rank runs with the kernels that ``expect`` names.

    What each worker says of itself comes first. The log is the second source: it can refute, but a line in it comes
    from the first rank alone and proves nothing of the others.
    """
    asked = {key: name for key in measured.expect.__struct_fields__ if (name := getattr(measured.expect, key))}
    if not asked and measured.version is None:
        return Verdict("not_applicable", "the recipe expects nothing")
    verdicts = [_kernel(measured, key, name) for key, name in asked.items()]
    return _all([*verdicts, *([] if measured.version is None else [_version(measured, measured.version)])])


def _all(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of many: refuted if any is, verified if all are."""
    for outcome in ("refuted", "unknown"):
        why = [each.why for each in verdicts if each.outcome == outcome]
        if why:
            return verdict(False if outcome == "refuted" else None, _some(why))
    return verdict(True, _some([each.why for each in verdicts]))


def _some(findings: Sequence[str]) -> str:
    more = f" (and {len(findings) - SHOWN} more)" if len(findings) > SHOWN else ""
    return "; ".join(findings[:SHOWN]) + more


def _version(measured: Measured, wanted: str) -> Verdict:
    said = {facts.engine_version for facts in measured.evidence.facts if facts.engine_version}
    said |= {measured.evidence.log.version} if measured.evidence.log.version else set()
    if not said:
        return verdict(None, "nobody says which vLLM it is")
    return verdict({version.partition("+")[0] for version in said} == {wanted},
                   f"it is vLLM {' and '.join(sorted(said))}, {wanted} was asked for")


def _kernel(measured: Measured, key: str, wanted: str) -> Verdict:
    fits = _FITS[key]
    workers = _workers(measured)
    silent = [_rank(facts) for facts in workers if getattr(facts, key) is None]
    wrong = [f"{_rank(facts)} has {key} {' and '.join(names) or 'none'}" for facts in workers
             if (names := getattr(facts, key)) is not None and not fits(names, wanted)]
    logged = getattr(measured.evidence.log, key, None)
    if not wrong and logged and not fits(logged, wanted):
        wrong = [f"the log has {key} {' and '.join(logged)}"]
    if wrong:
        return verdict(False, f"{_some(wrong)}, not {wanted}")
    missing = measured.ranks - len(set(map(_rank, workers)))
    if missing > 0:
        silent.append(f"{missing} of {measured.ranks} ranks")
    if silent and not (logged and measured.ranks == 1):
        return verdict(None, f"{key}: nothing is known of {_some(silent)}")
    return verdict(True, f"{key} is {wanted}")


def _only(names: Names, wanted: str) -> bool:
    """All layers have ``wanted``, in vLLM's spelling of it."""
    return bool(names) and all(name.lower().replace("-", "_") == wanted.lower().replace("-", "_") for name in names)


def _among(names: Names, wanted: str) -> bool:
    return wanted.lower() in {name.lower() for name in names}


def _layout(names: Names, wanted: str) -> bool:
    """Each is ``wanted`` or a layout of it: ``fp8_ds_mla`` is one of ``fp8``."""
    return bool(names) and all(f"{name.lower()}_".startswith(f"{wanted.lower()}_") for name in names)


_FITS: dict[str, Callable[[Names, str], bool]] = {
    "moe_backend": _only, "attention_backend": _among, "kv_cache_dtype": _layout, "input_quant": _only}


def _workers(measured: Measured) -> list[EngineFacts]:
    return [facts for facts in measured.evidence.facts if "worker" in facts.roles]


def _rank(facts: EngineFacts) -> str:
    return f"DP rank {facts.data_parallel_rank or 0}, TP rank {facts.tensor_parallel_rank or 0}"


def environment(measured: Measured) -> Verdict:
    """``environment``: the ``VLLM_`` variables that recipe and site set have reached every worker.

    One that does not changes the kernels and leaves no trace: ``VLLM_HUMMING_INPUT_QUANT_CONFIG``, lost on its way,
    gives W4A16 under the name of W4A8 (vLLM's pull request 51661).
    """
    asked = {name: value for name, value in measured.variables.items() if name.startswith("VLLM_")}
    if not asked:
        return Verdict("not_applicable", "no such variable is set")
    workers = _workers(measured)
    lost = [f"{_rank(facts)} has {name}={facts.environment[name]}" if name in facts.environment else
            f"{_rank(facts)} has no {name}"
            for facts in workers for name, value in asked.items() if facts.environment.get(name) != value]
    if lost:
        return verdict(False, _some(lost))
    missing = measured.ranks - len(set(map(_rank, workers)))
    return verdict(None if missing > 0 else True, f"{missing} of {measured.ranks} ranks say nothing" if missing > 0 else
                   f"{len(asked)} variables have arrived")


def compiled(measured: Measured) -> Verdict:
    """``compiled``: no kernel was compiled in the window, as far as the engine's log tells.

    vLLM watches what Triton, CuTeDSL and TileLang compile while it serves; not DeepGEMM and Humming, which compile by
    themselves. Unless it is told ``--jit-monitor-verbose`` it names each kernel once, so one that it has named before
    could be compiled again unheard.
    """
    log, kernels = measured.evidence.log, measured.evidence.compiled
    if kernels is None:
        return verdict(None, f"the log of vLLM {log.version or '(no version)'} is not known")
    if kernels:
        return verdict(False, f"{len(kernels)} in the window: {_some(kernels)}")
    if not log.monitors:
        return verdict(None, "the engine does not watch for it")
    if log.compiled and not log.verbose:
        return verdict(None, "kernels that were compiled before would not be named again: set jit-monitor-verbose")
    return verdict(True, "none")


def throttled(measured: Measured) -> Verdict:
    """``throttled``: no GPU lowered its clock for heat in the window. (The power cap is recorded, and no fault.)"""
    looks, workers = measured.evidence.looks, _workers(measured)
    hot = sorted({look.gpu for look in looks if look.reasons & THERMAL})
    if hot:
        return verdict(False, f"too hot: {', '.join(hot)}")
    if not looks and len(workers) >= measured.ranks and all(facts.device_type == "cpu" for facts in workers):
        return Verdict("not_applicable", "the engine computes on no GPU")
    seen = {look.gpu for look in looks}
    unseen = {facts.device.uuid for facts in workers if facts.device} - seen
    if unseen or len(seen) < measured.ranks:
        return verdict(None, f"only {len(seen)} of {measured.ranks} GPUs were looked at")
    return verdict(True, f"{len(looks)} looks at {len(seen)} GPUs")


def power_capped(measured: Measured) -> float | None:
    """The share of looks at the GPUs that found their clocks lowered by the power cap; None without looks."""
    looks = measured.evidence.looks
    return sum(bool(look.reasons & POWER_CAP) for look in looks) / len(looks) if looks else None


def binding(measured: Measured) -> Verdict:
    """``binding``: each of the engine's processes is on the cores and memory where it belongs."""
    audit = measured.evidence.audit
    if audit is None:
        return verdict(None, "nobody has looked")
    if audit.not_applicable:
        return Verdict("not_applicable", audit.not_applicable)
    return verdict(audit.verdict, _some(audit.findings) or audit.summary)


def outputs(measured: Measured) -> Verdict:
    """``outputs``: the answers to twenty fixed prompts are text: not empty, not one token again and again.

    Judged is only what is objectively broken; whether two engines answer alike, ``compare`` shows.
    """
    if measured.random_weights:
        return Verdict("not_applicable", "the model's weights are random")
    asked = measured.evidence.outputs
    if asked is None:
        return verdict(None, "the prompts were not asked, or not answered")
    findings = broken(asked)
    return verdict(len(findings) < BROKEN, _some(findings) or f"{len(asked.answers)} answers")
