"""The sections of docs/benchmarks.md that come from evidence other than the decode timing's."""

from __future__ import annotations

from typing import Any


def host_cost_section(evidence: dict[str, Any]) -> list[str]:
    """A table of build and launch, and each ratio."""
    lines = ["Microseconds of the host, medians: the step's metadata build and one layer's launch.", ""]
    lines += ["| backend | q | requests | build | launch | both |", "| --- | --- | --- | --- | --- | --- |"]
    for row in evidence["rows"]:
        lines.append(f"| {row['kernel']} | {row['q']} | {row['batch']} | {row['build_us']:.1f} | {row['launch_us']:.1f} | {row['us']:.1f} |")
    lines.append("")
    for item in evidence["comparisons"]:
        lines.append(
            f"- q as a {item['q']}: DENSE_MLA takes {item['ours_over_fastest_peer']:.3f} of the time of {item['fastest_peer']}, the fastest peer."
        )
    return lines + [f"- {failure['backend']} was not measured: {failure['error']}" for failure in evidence["failures"]]


def throughput_section(evidence: dict[str, Any]) -> list[str]:
    """Tokens per second by batch and context, a column an engine."""
    rows = evidence["rows"]
    names = list(dict.fromkeys((row["kernel"], row["partial_dtype"]) for row in rows))
    found = {(row["kernel"], row["partial_dtype"], row["batch"], row["context"]): row["tokens_per_s"] for row in rows}
    lines = [f"Tokens per second of a tiny model of {evidence['layers']} layers and {evidence['heads']} heads, the median of the runs.", ""]
    lines.append("| requests | keys of each | " + " | ".join(" ".join(filter(None, name)) for name in names) + " |")
    lines.append("| --- | --- |" + " --- |" * len(names))
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        cells = [f"{found[*name, batch, context]:.0f}" if (*name, batch, context) in found else "-" for name in names]
        lines.append(f"| {batch} | {context} | " + " | ".join(cells) + " |")
    return lines + [f"- {engine['name']} failed: {engine['error']}" for engine in evidence["engines"] if engine["error"]]


def load_section(evidence: dict[str, Any]) -> list[str]:
    """What the load was, and what of the promise was not kept."""
    if "requests" not in evidence:
        return [f"Failed: {line}" for line in evidence["unmet"]]
    counted = evidence["counters"]
    gap = max((item["logprob_gap"] or 0.0 for item in evidence["comparisons"]), default=0.0)
    return [
        f"{evidence['requests']} requests in {evidence['seconds']:.0f} s ({evidence['requests_per_s']:.0f} a second), "
        f"{evidence['aborted']} of them aborted by the client; "
        f"{counted['vllm:num_preemptions']:.0f} preemptions, {counted['vllm:prefix_cache_hits']:.0f} tokens found in the prefix cache. "
        f"GPU memory grew by {evidence['gpu_memory_growth_mib']} MiB after the first quarter. "
        f"{len(evidence['comparisons'])} answers compared with a quiet server's: largest logprob difference {gap:.3f} while the tokens agree.",
        "",
        "Passed." if evidence["passed"] else "Not passed: " + "; ".join(evidence["unmet"][:5]),
    ]


def served_section(evidence: dict[str, Any]) -> list[str]:
    """A line a comparison: ours and the peers' with the reference alike."""
    compiled = {"vllm": "vLLM's own", "none": "none, full graphs of decode steps"}.get(evidence.get("compilation", ""))
    lines = [
        *([f"Compilation: {compiled}.", ""] if compiled else []),
        "Differences of the logprobs of the tokens before the first that differs. The largest of some hundred is a matter of chance, their root mean "
        "square (rms) is less so.",
        "",
        "| run | with | prompts within the bar | tokens that agree | rms of the differences | largest difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_comparison_line(item) for item in evidence["comparisons"]]
    if control := evidence.get("control"):
        agreeing = ", ".join(str(prompt["agreeing"]) for prompt in control["prompts"])
        lines += ["", f"Without attention, of {evidence['max_tokens']} tokens of each answer these many stay the same: {agreeing}."]
    alone = [
        run["name"]
        for run in evidence["runs"]
        if not run["error"] and not any(run["name"] in (item["run"], item["with"]) for item in evidence["comparisons"])
    ]
    lines += ["", f"Answered, compared with nobody: {', '.join(alone)}."] if alone else []
    lines += [f"- {run['name']} failed: {run['error']}" for run in evidence["runs"] if run["error"]]
    lines += ["", f"Not run: {', '.join(evidence['not_run'])}."] if evidence.get("not_run") else []
    return [*lines, "", "Passed." if evidence["passed"] else "Not passed."]


def _comparison_line(item: dict[str, Any]) -> str:
    prompts = item["prompts"]
    gap = max((prompt["logprob_gap"] or 0.0 for prompt in prompts), default=0.0)
    within = f"{sum(prompt['within_bar'] for prompt in prompts)} of {len(prompts)}"
    agreeing = f"{item['agreeing']} of {item['tokens']}" if "agreeing" in item else "-"
    rms = item.get("logprob_rms")
    return f"| {item['run']} | {item['with']} | {within} | {agreeing} | {'-' if rms is None else f'{rms:.4f}'} | {gap:.3f} |"
