"""What MkDocs needs to build the site from Markdown that is written for the repository.

Pages outside of docs/ join it, links between both kinds are those of one folder, and a code block that names a file
(```python my_entente/bots.py) gets that name as its title.
"""

import logging
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LOG = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).resolve().parents[2]
JOINED = {
    "index.md": "README.md",
    "NOTICE.md": "NOTICE",
    **{
        name: name
        for name in (
            "CONTRIBUTING.md",
            "SECURITY.md",
            "CHANGELOG.md",
            "models/README.md",
            "models/whole-192/README.md",
            "models/smollm2/README.md",
        )
    },
}
"""Page of the site -> file of the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, name in JOINED.items():
        text = (ROOT / name).read_text()
        files.append(File.generated(config, page, content=text if name.endswith(".md") else f"# {name}\n\n```\n{text}```\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
    source = page.file.src_uri
    here = (ROOT / JOINED.get(source, f"docs/{source}")).parent
    pages = {ROOT / name: page for page, name in JOINED.items()}

    def site_link(match: re.Match[str]) -> str:
        mark, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        target = Path(os.path.normpath(here / link))
        if not target.exists():
            LOG.warning("%s: there is no %s", source, link)  # MkDocs passes some of these in silence
        if target not in pages and not target.is_relative_to(ROOT / "docs"):
            return text  # a file of the repository that the site does not have
        in_site = pages.get(target) or os.path.relpath(target, ROOT / "docs")
        return f"{mark}[{text}]({os.path.relpath(in_site, Path(source).parent)}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", site_link, markdown)
