"""The directives `{options} JOB` and `{commands}`: reference pages out of the code itself."""

from sphinx.util.docutils import SphinxDirective

from pixelrag.cli import COMMANDS
from pixelrag.config.help import default_of
from pixelrag.config.jobs import EXTENDED, JOBS, config_class
from pixelrag.config.problems import describe, options_of, sections_of

# Now: autodoc loads modules again with TYPE_CHECKING on, which declares options in another order.
KINDS = {job: config_class(job) for job in (*JOBS, *EXTENDED)}


class Options(SphinxDirective):
    """Every option of a job's configuration, a heading and a table for each section."""

    required_arguments = 1

    def run(self):
        kind = KINDS[self.arguments[0]]
        options, lines = options_of(kind), []
        for section in ("", *sections_of(kind)):
            rows = {name: field for name, field in options.items()
                    if name.rpartition(".")[0] == section}  # fmt: skip
            lines += ["", f"## {section or 'the run'}", ""]
            lines += ["| option | takes | default | |", "| --- | --- | --- | --- |"]
            for name, field in rows.items():
                default = "required" if field.is_required() else _code(default_of(field))
                cells = (_code(name), describe(field), default, field.description or "")
                lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        return parsed(self, lines)


class Commands(SphinxDirective):
    """Every command, with the flags of its own."""

    def run(self):
        lines = []
        for name, command in COMMANDS.items():
            lines += [f"`pixelrag {name}`", f": {command.summary[0].upper()}{command.summary[1:]}."]
            if command.job is not None:
                lines.append(f"  Takes {_taken(command.job)}.")
            lines += [f"  - `--{flag}`: {text}" for flag, text in command.own.items()] + [""]
        return parsed(self, lines)


def parsed(directive, lines):
    """The Markdown `lines`, headings too, as nodes."""
    text = "\n".join(lines)
    return directive.parse_text_to_nodes(text, allow_section_headings=True)


def _taken(job):
    return "the options of the job that the configuration is of" if job == "any" else (
        f"the [options of {job}]({job}.md)"
    )  # fmt: skip


def _code(text):
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("\n", "\\n") if text else ""


def setup(app):
    app.add_directive("options", Options)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
