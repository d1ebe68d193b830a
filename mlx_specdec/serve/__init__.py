"""An HTTP server for clients of OpenAI, Anthropic, TGI and llama.cpp. Needs the extra `server`."""
