"""The part of the build that pyproject.toml cannot say: the native engine is compiled where there is a C++ compiler."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = "skipstone.engines.native"
LOST = "Everything else works; without the native engine, models on the CPU run on PyTorch's kernels."


def native_build() -> ModuleType:
    """The module that knows compiler and flags, loaded by its path: importing skipstone would need what it depends on."""
    path = Path(__file__).resolve().parent.joinpath("src", *PACKAGE.split("."), "build.py")
    spec = importlib.util.spec_from_file_location("skipstone_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildNative(Command):
    """Compiles the native engine: beside its sources for an editable install, else into build_lib. It never fails."""

    description = "compile the native engine where there is a C++ compiler"
    user_options = ()
    editable_mode = False

    def initialize_options(self) -> None:
        """What setuptools asks of a command."""
        self.build_lib = None

    def finalize_options(self) -> None:
        """What setuptools asks of a command."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Compile. Where that fails, one sentence says what is lost."""
        native = native_build()
        names = [level.name for level in native.levels()]
        folder = native.HERE if self.editable_mode else self.folder()
        for old in [] if self.editable_mode else self.libraries():
            old.unlink()
        try:
            native.build(native.stale(names, folder) if self.editable_mode else names, folder)
        except native.BuildError as error:
            print(f"skipstone's native engine is not built: {error}\n{LOST}", file=sys.stderr)

    def folder(self) -> Path:
        """Where the package's native engine lies in build_lib."""
        return Path(self.build_lib, *PACKAGE.split("."))

    def libraries(self) -> list[Path]:
        """The libraries that lie in build_lib."""
        return sorted(self.folder().glob("skipstone_native-*.so"))

    def get_source_files(self) -> list[str]:
        """What a source distribution needs: package-data of pyproject.toml names the C++ files already."""
        return []

    def get_outputs(self) -> list[str]:
        """The libraries, by their paths in build_lib."""
        return list(self.get_output_mapping()) if self.editable_mode else list(map(str, self.libraries()))

    def get_output_mapping(self) -> dict[str, str]:
        """For an editable install: path in build_lib -> path in the source tree, of each library."""
        if not self.editable_mode:
            return {}
        built = Path("src", *PACKAGE.split(".")).glob("skipstone_native-*.so")
        return {str(self.folder() / path.name): str(path) for path in built}


class Wheel(bdist_wheel):
    """A wheel with libraries is for one platform and for any Python 3, since no library knows of Python."""

    def run(self) -> None:
        """Compile before the wheel is laid out, since its tag depends on what was built."""
        if not self.skip_build:
            self.run_command("build_native")
        native = self.get_finalized_command("build_native")
        assert isinstance(native, BuildNative)
        self.root_is_pure = not native.libraries()
        if not self.root_is_pure:  # else the install command takes the package for a pure one, and lays it out apart
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-any without libraries, py3-none-PLATFORM with them."""
        python, abi, system = super().get_tag()
        return (python, abi, system) if self.root_is_pure else (self.python_tag, "none", system)


class Build(build):
    """setuptools' build, and the native engine."""

    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012  what setuptools calls it


setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel})
