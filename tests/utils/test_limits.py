"""The memory that a process may take, within its cgroups."""

from pathlib import Path

import pytest
import torch

from skipstone.utils import limits

V2 = {"memory.max": "{limit}", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200\nactive_file 100"}
V1 = {
    **{"memory.limit_in_bytes": "{limit}", "memory.usage_in_bytes": "700"},
    "memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100",
}


@pytest.mark.parametrize(("line", "folder", "files"), [("0::/a/b", "", V2), ("4:memory:/a/b", "memory", V1)], ids=str)
@pytest.mark.parametrize("limited", ["", "a", "a/b"])
def test_the_smallest_limit_of_the_own_cgroups_counts(
    line: str, folder: str, files: dict[str, str], limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(f"9:cpu:/c\n{line}\n")
    for place in ("", "a", "a/b", "other"):
        limit = {limited: "1000", "other": "1"}.get(place, "2000" if folder else "max")
        (tmp_path / "cgroup" / folder / place).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "cgroup" / folder / place / name).write_text(content.format(limit=limit) + "\n")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "own")
    assert limits.device_memory_bytes(torch.device("cpu")) == 1000
    assert limits.available_memory_bytes() == 1000 - (700 - 200 - 100)
