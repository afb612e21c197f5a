"""What a verification of an engine on disk found, as one list of checks: for the terminal, for JSON, and for JUnit."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from enginewright.recipes.errors import VerificationError
from enginewright.runtime.first_load import STRUCTURE_ONLY

if TYPE_CHECKING:
    from .bisection import Bisection

__all__ = ["Check", "EngineReport", "checks_of", "junit", "verdict_of_build"]

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_FIGURES = (
    # name in a verification, limit's key, words, format, how the limit bounds it
    ("relative_logit_error", "max_logit_error", "largest logit error, of the largest logit", ".3g", "≤"),
    ("mean_kl", "max_kl", "mean KL divergence, nats", ".3g", "≤"),
    ("top1_agreement", "min_top1", "top-1 agreement", ".2%", "≥"),
    ("perplexity_ratio", "max_perplexity_ratio", "perplexity ratio", ".4f", "≤"),
)


@dataclass(frozen=True)
class Check:
    """One thing that was held against what it must be. `group`: files, build, goldens, figures, positions, stages, schedules,
    baseline.

    `passed` is None where the check could not be made; `found` then says why.
    """

    group: str
    name: str
    passed: bool | None
    found: str
    expected: str = ""


@dataclass
class EngineReport:
    """The verification of an engine on disk.

    `manifest`: engine.json, empty where it could not be trusted. `verification`: figures against the source model, where there
    was one. `bisection`: what was found of the pass or op at fault, where it was asked for.
    """

    engine: str
    manifest: Mapping[str, Any]
    level: str
    build: Mapping[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    verification: dict[str, Any] | None = None
    bisection: Bisection | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return not self.failures

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: for --json, and for a baseline (`baseline.py` reads model, level, bytes and verification)."""
        manifest = self.manifest
        model = manifest.get("model", {})
        return {
            "engine": self.engine,
            "level": self.level,
            "verdict": "passed" if self.passed else "failed",
            "seconds": round(self.seconds, 3),
            "enginewright_version": manifest.get("enginewright_version"),
            "backend": manifest.get("backend"),
            "model": {name: model.get(name) for name in ("source", "architecture", "parameters")},
            "recipe": manifest.get("recipe", {}).get("name"),
            "manifest_sha256": manifest.get("manifest_sha256"),
            "bytes": sum(entry["bytes"] for entry in manifest.get("files", {}).values()),
            "checks": [asdict(check) for check in self.checks],
            "verification": self.verification,
            "bisection": None if self.bisection is None else self.bisection.to_dict(),
        }

    def raise_if_failed(self) -> None:
        """Raise VerificationError that names every failed check."""
        if self.passed:
            return
        groups = {check.group for check in self.failures}
        if groups == {"files"}:
            action = None  # what was found says what to do
        elif groups == {"baseline"}:
            action = (
                "see what has changed since the baseline was written; where it is to be so, write the baseline anew, or "
                'allow more in its "allowed"'
            )
        else:
            action = "build it again; `--against MODEL --bisect` names the pass or op at fault"
        raise VerificationError(
            f"the engine at {self.engine} did not verify: "
            + "; ".join(f"{check.name}: {check.found}" for check in self.failures),
            expected="; ".join(check.expected for check in self.failures if check.expected) or None,
            action=action,
        )


def checks_of(verification: Mapping[str, Any]) -> list[Check]:
    """The checks that a verification's figures are (as in the manifest: `Verification.to_dict`)."""
    limits = verification["limits"]
    found = []
    for name, key, words, form, sign in _FIGURES:
        if key not in limits:
            continue
        value, limit = verification[name], limits[key]
        within = value is not None and (value >= limit if sign == "≥" else value <= limit)
        shown = "not finite" if value is None else format(value, form)
        found.append(Check("figures", words, within, shown, f"{sign} {limit:g}"))
    if verification.get("greedy_agreement") is not None and "max_logit_error" in limits:
        agreed = verification["greedy_agreement"]
        told = f"{agreed:.2%} of {verification['greedy_tokens']}"
        found.append(Check("figures", "greedy tokens are the source's, or tied", agreed == 1, told, "all"))
    finite = [failure for failure in verification["failures"] if "not finite" in failure]
    found.append(Check("figures", "logits are finite", not finite, "; ".join(finite) or "all of them"))
    odd = [failure for failure in verification["failures"] if failure.startswith("positions ")]
    told = "; ".join(odd) or f"{len(verification['bands'])} bands, none stands out"
    found.append(Check("positions", "divergence by position", not odd, told))
    if verification["invariant"] is not None:
        # Of logits; what the schedules below found counts there.
        same = verification["invariant"] or any(not way["same"] for way in verification["schedules"])
        found.append(
            Check("schedules", "chunks and company", same, "the same bits" if same else "other bits")
        )
    for stage in verification.get("stages", ()):
        value = "not finite" if stage["value"] is None else format(stage["value"], ".3g")
        told = f"{value} ({stage['found']})" if stage["found"] else value
        found.append(
            Check(
                "stages",
                f"{stage['stage']}: {stage['figure']}",
                stage["passed"],
                told,
                f"≤ {stage['limit']:.3g}",
            )
        )
    for way in verification["schedules"]:
        came = way["found"] or (
            "the same bits" if way["happened"] else "the same bits, but it did not come about"
        )
        found.append(
            Check("schedules", way["name"], way["same"], came, "the same tokens and log-probabilities")
        )
    if verification["failures"] and all(check.passed is not False for check in found):
        found.append(Check("figures", "verdict", False, "; ".join(verification["failures"])))
    return found


def verdict_of_build(manifest: Mapping[str, Any]) -> Check:
    """Whether the build, which sees what lies between model and engine, let the engine pass."""
    recorded = manifest["verification"]
    failed = recorded["verdict"] == "failed"
    told = "; ".join(recorded.get("failures", ())) or "it failed"
    found = told if failed else recorded["verdict"]
    return Check("build", "verdict of the build", not failed, found, f"passed, or {STRUCTURE_ONLY}")


def junit(report: EngineReport) -> bytes:
    """The report as JUnit XML, which CI services read: one test case a check."""
    skipped = sum(check.passed is None for check in report.checks)
    suite = ElementTree.Element(
        "testsuite",
        name="engine verify",
        tests=str(len(report.checks)),
        failures=str(len(report.failures)),
        skipped=str(skipped),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name in ("engine", "level"):
        ElementTree.SubElement(properties, "property", name=name, value=getattr(report, name))
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=f"engine.{check.group}", name=check.name)
        said = f"found {check.found}" + (f", expected {check.expected}" if check.expected else "")
        if check.passed is False:
            ElementTree.SubElement(case, "failure", message=said).text = said
        elif check.passed is None:
            ElementTree.SubElement(case, "skipped", message=check.found)
        else:
            ElementTree.SubElement(case, "system-out").text = said
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    for element in root.iter():
        element.text = None if element.text is None else _printable(element.text)
        element.attrib = {name: _printable(value) for name, value in element.attrib.items()}
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _printable(text: str) -> str:
    """The text with what no XML document may hold, even escaped, as backslash sequences."""
    return _NO_XML.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
