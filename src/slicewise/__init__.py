"""slicewise: plan, prove, run and keep alive LLM training over accelerator slices."""

__version__ = "0.1.0"
