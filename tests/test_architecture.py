"""What holds of the code as a whole: who may import whom, what is public, what the wheel and the app bundle hold."""

import ast
import configparser
import io
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hyperbloom

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "common", "server", "strategies")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SHIPPED = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.*")
    if path.suffix in {".py", ".html", ".js", ".csv", ".json", ".md", ".txt", ".toml"}
)

# Flower's public packages; everything else of it may change between two releases.
PUBLIC_FLOWER = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
USE_INTERNALS = {"server/broker/flower.py", "client/link/internals.py"}
# What never reaches Flower, directly or through anything that it imports.
PURE_FOLDERS = (
    "client/keep/",
    "client/work/",
    "common/encoders/",
    "common/graphs/",
    "common/models/",
    "common/wire/",
    "strategies/",
)
PACK = "common/wire/pack.py"  # the one module of them that knows Flower
MATHEMATICS = ("sgd", "methods", "vectorised", "refinement", "scoring", "own_network")

# Who may import whom; a package may always import itself.
ALLOWED = {
    "common": set(),
    "client": {"common"},
    "strategies": {"common"},
    "server": {"common", "strategies"},
}
EXCEPTIONS = {
    ("server/flower_app.py", "client"),
    ("server/grids/engine.py", "client"),
    ("server/grids/local_clients.py", "client"),
    ("server/grids/workers.py", "client"),
}  # the clients that a run starts


def relative(path: Path) -> str:
    """Return a source file's name as it is written above."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, wherever in the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: imports are absolute"
            assert node.module is not None
            # `from hyperbloom import server` names a package as `import hyperbloom.server` does
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def belongs(name: str, package: str) -> bool:
    """Tell whether a dotted name is a package or in it."""
    return name == package or name.startswith(package + ".")


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 40
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in SOURCES:
        own = path.relative_to(ROOT).parts[0]
        for name in imports(path):
            assert name.split(".")[0] not in PACKAGES, f"{relative(path)}: import {name} as hyperbloom.{name}"
            for other in PACKAGES:
                allowed = other == own or other in ALLOWED[own] or (relative(path), other) in EXCEPTIONS
                wrong += [f"{relative(path)}: {name}"] if belongs(name, f"hyperbloom.{other}") and not allowed else []
    assert wrong == []


def test_the_exceptions_are_needed() -> None:
    for file, package in EXCEPTIONS:
        assert any(belongs(name, f"hyperbloom.{package}") for name in imports(ROOT / file))


def dotted(path: Path) -> str:
    """Return the name by which a source file is imported."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    return f"hyperbloom.{name}"


def test_the_mathematics_never_reaches_flower() -> None:
    """In a process that cannot import it; nothing that these modules import needs it either."""
    pure = [dotted(path) for path in SOURCES if relative(path).startswith(PURE_FOLDERS) and relative(path) != PACK]
    assert len(pure) > 50
    code = (
        "import importlib, sys\n"
        "sys.modules['flwr'] = sys.modules['grpc'] = None\n"
        f"for name in {pure}: importlib.import_module(name)\n"
        f"print({dotted(ROOT / PACK)!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


@pytest.mark.parametrize("name", MATHEMATICS)
def test_the_mathematics_takes_settings_and_no_orders(name: str) -> None:
    found = [each for each in imports(ROOT / f"client/work/{name}.py") if "wire" in each]
    assert not [each for each in found if each.endswith("Order")]


def test_flowers_internals_are_used_in_few_files() -> None:
    users = set()
    for path in SOURCES:
        flower = [name for name in imports(path) if belongs(name, "flwr")]
        if not all(any(belongs(name, public) for public in PUBLIC_FLOWER) for name in flower):
            users.add(relative(path))
    assert users == USE_INTERNALS


def test_the_commands_import_nothing_heavy_before_they_have_read_their_flags() -> None:
    code = (
        "import sys, hyperbloom.client.cli, hyperbloom.server.cli\n"
        "print([name for name in ('torch', 'flwr', 'sklearn', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------------- what modules say


def test_every_module_says_what_it_is() -> None:
    said = {relative(path): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in SOURCES}
    assert [name for name, text in said.items() if not text.partition("\n")[0].endswith((".", ":", "?"))] == []


# ---------------------------------------------------------------------- the tests mirror the source

# Both numbers may fall, and never rise.
MODULES_WITHOUT_A_TEST_FILE = 36
TEST_FILES_WITHOUT_A_MODULE = 25


def mirrored(path: Path) -> set[str]:
    """Return where the tests of a module may be: at the mirrored path, or with those of the folder that it lies in.

    `common/models/unet.py` has its tests in `tests/common/models/test_unet.py`, or beside those of its siblings in
    `tests/common/models/test_models.py` or `tests/common/test_models.py`.
    """
    folder = Path("tests", *path.relative_to(ROOT).parent.parts)
    own, together = f"test_{path.stem}.py", f"test_{folder.name}.py"
    return {file.as_posix() for file in (folder / own, folder / together, folder.parent / together)}


def test_every_module_has_a_test_file_and_every_test_file_a_module() -> None:
    tests = {relative(path) for package in PACKAGES for path in (ROOT / "tests" / package).rglob("test_*.py")}
    modules = [path for path in SOURCES if not path.name.startswith("__")]
    untested = [relative(path) for path in modules if not mirrored(path) & tests]
    strays = sorted(tests - {file for path in SOURCES for file in mirrored(path)})
    assert len(untested) <= MODULES_WITHOUT_A_TEST_FILE, untested
    assert len(strays) <= TEST_FILES_WITHOUT_A_MODULE, strays


# ---------------------------------------------------------------------- what is shipped


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build a wheel from a copy of the sources, as building leaves files beside them, as git lays it out on Windows."""
    pytest.importorskip("setuptools", reason="setuptools builds the wheel")
    pytest.importorskip("pip", reason="pip builds the wheel")
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("hyperbloom", *PACKAGES):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in PACKAGES:  # without links, git writes files that hold where they lead
        (copy / "hyperbloom" / name).unlink()
        (copy / "hyperbloom" / name).write_text(f"../{name}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    done = subprocess.run([*command, str(out), str(copy)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_owns_one_name(wheel: zipfile.ZipFile) -> None:
    owned = {name.split("/")[0] for name in wheel.namelist()}
    assert owned == {"hyperbloom", f"hyperbloom-{hyperbloom.__version__}.dist-info"}


def test_the_wheel_holds_every_source_file_once_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = ["hyperbloom/__init__.py", *(f"hyperbloom/{relative(path)}" for path in SHIPPED)]
    found = [name for name in wheel.namelist() if name.startswith("hyperbloom/")]
    assert sorted(found) == sorted(expected)
    for path in SHIPPED:
        assert wheel.read(f"hyperbloom/{relative(path)}") == path.read_bytes()


def test_the_wheel_brings_both_commands_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = f"hyperbloom-{hyperbloom.__version__}.dist-info"
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert {section: dict(entries[section]) for section in entries.sections()} == {
        "console_scripts": {
            "flower-client": "hyperbloom.client.__main__:program",
            "flower-server": "hyperbloom.server.__main__:program",
        }
    }
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


def test_the_package_list_is_what_lies_on_the_disk() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {f"hyperbloom.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}" for path in SOURCES}
    assert set(listed) == {"hyperbloom", *folders}


def test_the_links_for_static_tools_point_at_the_packages() -> None:
    for package in PACKAGES:
        link = ROOT / "hyperbloom" / package
        assert link.is_symlink()
        assert link.readlink() == Path("..") / package  # relative, or a clone elsewhere would be broken


def test_the_app_bundle_holds_two_files_the_same_every_time() -> None:
    from hyperbloom.server.broker.hosted import bundle

    content = bundle().content
    assert bundle().content == content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.startswith(".info/")]  # Flower's own list of contents
        assert sorted(names) == ["hyperbloom_bundle.py", "pyproject.toml"]
        code = archive.read("hyperbloom_bundle.py").decode()
        described = tomllib.loads(archive.read("pyproject.toml").decode())
    assert "from hyperbloom.client.app import app" in code
    assert described["project"]["version"] == hyperbloom.__version__
    assert described["project"]["dependencies"] == []  # flwr 1.40 and later would install them on every SuperNode
    scope: dict[str, object] = {}
    exec(compile(code, "hyperbloom_bundle.py", "exec"), scope)
    from hyperbloom.client.app import app

    assert scope["client"] is app


def test_flower_accepts_the_app_bundle() -> None:
    from flwr.common.config import get_fab_config, validate_config

    from hyperbloom.server.broker.hosted import bundle

    config = get_fab_config(bundle().content)
    valid, errors, _ = validate_config(config, check_module=False)
    assert (valid, errors) == (True, [])
    assert config["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "hyperbloom_bundle:server",
        "clientapp": "hyperbloom_bundle:client",
    }
