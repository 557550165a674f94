"""What is asked of a server while it is measured: random prompts, chats, a recorded agent's session; and when."""
