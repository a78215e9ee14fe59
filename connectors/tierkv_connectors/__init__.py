"""The engine side of tierkv: what runs inside an engine process."""
