"""An HTTP server around one engine, for clients of OpenAI, Anthropic, TGI and llama.cpp.

Needs the extra `server`, all but `chat` and what that imports.
"""
