from pathlib import Path

from app.command.runs import keep_logs_only, logs_of


def test_what_a_run_leaves_are_its_logs(tmp_path: Path) -> None:
    session = tmp_path / "session_2026-01-01_00-00-01_0_1"
    (session / "logs").mkdir(parents=True)
    (session / "sockets").mkdir()
    (session / "sockets" / "raylet").touch()
    (tmp_path / "session_latest").symlink_to(session)
    (tmp_path / "ray-start.log").touch()
    (logs_of(tmp_path) / "raylet.out").write_text("said")
    keep_logs_only(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"ray-start.log", f"{session.name}/logs/raylet.out"}
    assert (logs_of(tmp_path) / "raylet.out").read_text() == "said"


def test_a_run_without_logs_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "slip-1"
    run.mkdir()
    keep_logs_only(run)
    assert not run.exists()
