"""Inference engines: ids in, ids and log-probs out (DESIGN §3 InferenceEngine).

`scripted` answers from a file and needs no model; `torch_*` samples from a Hugging Face causal language model
and is the only place outside training that imports torch and transformers; `relay*` passes conversations on to
a model behind somebody else's API (ConversationEngine) and is the aiohttp client's door. Import the module you
need: this package imports nothing, so that a proxy with a scripted engine starts without torch.
"""
