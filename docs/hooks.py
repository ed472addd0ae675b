"""What mkdocs does besides rendering: the options of every command, and the examples as files."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"\]\(\.\./(examples/[\w./-]+)\)")


def command_options() -> str:
    """Return the usage and options of every command as Markdown, generated from the program."""
    from fedcover.cli import app

    text = app.generate_docs(output_format="markdown", heading_level=2)
    _, _, commands = text.partition("\n### ")
    return "## Options of each command\n\n### " + commands


def on_files(files: Any, config: Any) -> Any:
    """Copy the examples that pages link to into the site."""
    from mkdocs.structure.files import File

    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for target in sorted(set(EXAMPLE.findall(pages))):
        path = ROOT / target
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = str(source.relative_to(ROOT))
            files.append(File.generated(config, name, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the generated options; link to examples where the site has them."""
    if page.file.src_uri == "cli.md":
        markdown = markdown.replace("<!-- options -->", command_options())
    return EXAMPLE.sub(_example_link, markdown)


def _example_link(match: re.Match[str]) -> str:
    target = match[1]
    if (ROOT / target).is_dir():
        target = str(next((ROOT / target).rglob("server_app.py"), ROOT / target).relative_to(ROOT))
    return f"]({target})"
