"""The sections of docs/benchmarks.md that come from evidence other than the decode timing's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engine_log import OURS

MAX_UNMET = 20


def host_cost_section(evidence: dict[str, Any]) -> list[str]:
    """A table of build and launch, and each ratio."""
    lines = ["Microseconds of the host, medians: the step's metadata build and one layer's launch.", ""]
    lines += ["| backend | q | requests | build | launch | both |", "| --- | --- | --- | --- | --- | --- |"]
    for row in evidence["rows"]:
        lines.append(f"| {row['kernel']} | {row['q']} | {row['batch']} | {row['build_us']:.1f} | {row['launch_us']:.1f} | {row['us']:.1f} |")
    lines.append("")
    for item in evidence["comparisons"]:
        lines.append(
            f"- q as a {item['q']}: DENSE_MLA takes {item['ours_over_fastest_peer']:.3f} of the time of {item['fastest_peer']}, the fastest peer; "
            f"the aim, no longer than it, is {'met' if item['ours_over_fastest_peer'] <= 1 else 'missed'}."
        )
    return lines + [f"- {failure['backend']} was not measured: {failure['error']}" for failure in evidence["failures"]]


def throughput_section(evidence: dict[str, Any]) -> list[str]:
    """Tokens per second by batch and context, a column an engine."""
    rows = evidence["rows"]
    if not rows:
        return ["Nothing was measured.", *missing_lines(evidence["not_run"], evidence["engines"])]
    names = list(dict.fromkeys((row["kernel"], row["partial_dtype"]) for row in rows))
    found = {(row["kernel"], row["partial_dtype"], row["batch"], row["context"]): row["tokens_per_s"] for row in rows}
    lines = [f"Tokens per second of a tiny model of {evidence['layers']} layers and {evidence['heads']} heads, the median of the runs.", ""]
    lines.append("| requests | keys of each | " + " | ".join(" ".join(filter(None, name)) for name in names) + " |")
    lines.append("| --- | --- |" + " --- |" * len(names))
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        cells = [f"{found[*name, batch, context]:.0f}" if (*name, batch, context) in found else "-" for name in names]
        lines.append(f"| {batch} | {context} | " + " | ".join(cells) + " |")
    return [*lines, "", *throughput_findings(rows), *missing_lines(evidence["not_run"], evidence["engines"])]


def throughput_findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """DENSE_MLA in its first partial dtype beside the fastest peer, in every case that both were measured in."""
    ratios = []
    for shape in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        here = [row for row in rows if (row["batch"], row["context"]) == shape]
        ours = next((row["tokens_per_s"] for row in here if row["kernel"] == OURS), None)
        peers = [row["tokens_per_s"] for row in here if row["kernel"] != OURS]
        if ours and peers:
            ratios.append((ours / max(peers), shape))
    if not ratios:
        return []
    behind = [f"{batch} x {context} ({ratio:.2f})" for ratio, (batch, context) in ratios if ratio < 1]
    return [
        f"- More tokens per second than the fastest peer in {len(ratios) - len(behind)} of {len(ratios)} cases"
        + (f": not in {', '.join(behind)}." if behind else ".")
    ]


def missing_lines(not_run: Sequence[str], runs: Sequence[dict[str, Any]]) -> list[str]:
    """What failed, what did not run, and which runs are of another commit than the file."""
    lines = [f"- {run['name']} failed: {run['error']}" for run in runs if run["error"]]
    lines += [f"- Not run: {', '.join(not_run)}."] if not_run else []
    others: dict[str, list[str]] = {}
    for run in runs:
        if run.get("source"):
            others.setdefault(run["source"], []).append(run["name"])
    return lines + [f"- Of commit {source}: {', '.join(names)}." for source, names in others.items()]


def load_section(evidence: dict[str, Any]) -> list[str]:
    """What the load was, and what of the promise was not kept."""
    counted = evidence["counters"]
    gap = max((item["logprob_gap"] or 0.0 for item in evidence["comparisons"]), default=0.0)
    counters = [
        f"{counted[name]:.0f} {what}"
        for name, what in (("vllm:num_preemptions", "preemptions"), ("vllm:prefix_cache_hits", "tokens found in the prefix cache"))
        if name in counted
    ]
    done = [f"{evidence['completed']} answered", f"{evidence['aborted']} aborted by the client", f"{len(evidence['errors'])} or more failed"]
    lines = [
        f"{evidence['requests']} requests in {evidence['seconds']:.0f} s: {', '.join(done[: 3 if evidence['errors'] else 2])}. "
        f"{', '.join(counters) or 'No counter was read'}. "
        f"GPU memory grew by {evidence['gpu_memory_growth_mib']} MiB after the first quarter. "
        f"{len(evidence['comparisons'])} answers compared with a quiet server's: largest logprob difference {gap:.3f} while the tokens agree.",
        "",
        "Passed." if evidence["passed"] else "Not passed:",
        "",
    ]
    shown, more = evidence["unmet"][:MAX_UNMET], len(evidence["unmet"]) - MAX_UNMET
    return lines + [f"- {line}" for line in shown] + ([f"- and {more} more of the kind"] if more > 0 else [])


def served_section(evidence: dict[str, Any]) -> list[str]:
    """A line a comparison: ours and the peers' with the reference alike."""
    compiled = {"vllm": "vLLM's own", "none": "none, full graphs of decode steps, Triton kernels not tuned"}.get(evidence.get("compilation", ""))
    lines = [
        *([f"Compilation: {compiled}.", ""] if compiled else []),
        "Differences of the logprobs of the tokens before the first that differs. The largest of some hundred is a matter of chance, their root mean "
        "square (rms) is less so.",
        "",
        "| run | with | prompts within the bar | tokens that agree | rms of the differences | its bar | largest difference | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rms_bar = evidence["bars"].get("logprob_rms")
    lines += [_comparison_line(item, item.get("logprob_rms_bar", rms_bar)) for item in evidence["comparisons"]]
    if control := evidence.get("control"):
        agreeing = ", ".join(str(prompt["agreeing"]) for prompt in control["prompts"])
        lines += ["", f"Without attention, of {evidence['max_tokens']} tokens of each answer these many stay the same: {agreeing}."]
    alone = [
        run["name"]
        for run in evidence["runs"]
        if not run["error"] and not any(run["name"] in (item["run"], item["with"]) for item in evidence["comparisons"])
    ]
    lines += ["", f"Answered, compared with nobody: {', '.join(alone)}."] if alone else []
    missing = missing_lines(evidence.get("not_run", []), evidence["runs"])
    lines += ["", *missing] if missing else []
    return [*lines, "", f"{'Passed' if evidence['passed'] else 'Not passed'}: {_bars(evidence['bars'])}."]


def _bars(bars: dict[str, float]) -> str:
    """What the run was held to. Not every file is of a time when both bars stood."""
    rms = "what the table says for their root mean square" if "logprob_rms" in bars else "none for their root mean square"
    return f"the bar was a difference of {bars['logprob_gap']} for every token's logprob, and {rms}"


def _comparison_line(item: dict[str, Any], rms_bar: float | None) -> str:
    prompts = item["prompts"]
    gap = max((prompt["logprob_gap"] or 0.0 for prompt in prompts), default=0.0)
    within = f"{sum(prompt['within_bar'] for prompt in prompts)} of {len(prompts)}"
    agreeing = f"{item['agreeing']} of {item['tokens']}" if "agreeing" in item else "-"
    rms = item.get("logprob_rms")
    apart = f"{'-' if rms is None else f'{rms:.4f}'} | {rms_bar or '-'}"
    verdict = "within the bars" if item["within_bar"] else "not within the bars" if item["required"] else "not within the bars (not required)"
    return f"| {item['run']} | {item['with']} | {within} | {agreeing} | {apart} | {gap:.3f} | {verdict} |"
