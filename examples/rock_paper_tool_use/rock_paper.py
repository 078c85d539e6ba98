"Rock, paper, scissors through a tool: the opponent, the tool, a rollout, and matches to warm up on."
import json
import random
from dataclasses import dataclass, field

import art_nb as art

MOVES = ["rock", "paper", "scissors"]
BEATS = {"rock": "scissors", "paper": "rock", "scissors": "paper"}
ROUNDS = 4
PLAY = {"name": "play", "description": "Play one round.", "parameters": {
    "type": "object", "properties": {"move": {"type": "string", "enum": MOVES}}, "required": ["move"]}}
TOOLS = [{"type": "function", "function": PLAY}]
OPENING = [{"role": "system", "content": "You play rock, paper, scissors against someone who likes to repeat a move."},
           {"role": "user", "content": f"{ROUNDS} rounds. Call play once for each."}]


class NoMove(ValueError):
    "The reply is no call of the tool that makes sense."


@dataclass
class Match:
    "Some rounds; the seed fixes the opponent, who repeats the last move four times out of five."
    seed: int
    theirs: list[str] = field(default_factory=list)
    points: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def play(self, move: str) -> str:
        "One round; what the tool answers."
        if move not in MOVES:
            raise NoMove(f"{move!r} is none of {', '.join(MOVES)}")
        repeats = self.theirs and self.random.random() < 0.8
        answer = self.theirs[-1] if repeats else self.random.choice(MOVES)
        self.theirs.append(answer)
        won, lost = BEATS[move] == answer, BEATS[answer] == move
        self.points += won - lost
        return f"They played {answer}. You {'won' if won else 'lost' if lost else 'drew'}."

    def over(self) -> bool:
        "Whether all rounds are played."
        return len(self.theirs) == ROUNDS


def move_of(choice) -> tuple[str, str]:
    "Id and move of the call in a reply; raises NoMove."
    calls = choice.message.tool_calls or []
    if len(calls) != 1 or calls[0].function.name != "play":
        raise NoMove(f"play has to be called once, and this was said: {choice.message.content!r}")
    return calls[0].id, str(json.loads(calls[0].function.arguments).get("move"))


async def rollout(model: art.Model, seed: int) -> art.Trajectory:
    "One match. Its reward is points a round, from -1 to 1; a reply that plays nothing ends it with -1."
    match, client = Match(seed), model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[*OPENING], tools=TOOLS, metadata={"seed": seed})
    while not match.over():
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=TOOLS, max_completion_tokens=40)
        trajectory.messages_and_choices.append(choice := completion.choices[0])
        try:
            call, move = move_of(choice)
            answer = match.play(move)
        except NoMove as error:
            trajectory.log(str(error))
            break
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call, "content": answer})
    trajectory.reward = match.points / ROUNDS if match.over() else -1.0
    trajectory.metrics.update(points=match.points, finished=match.over(), win=match.over() and match.points > 0)
    return trajectory.finish()


def random_match(seed: int) -> art.Trajectory:
    "A match of random moves, written down as the model should write it."
    match, mover, messages = Match(seed), random.Random(-seed), [*OPENING]
    while not match.over():
        move = mover.choice(MOVES)
        call = {"id": f"call_{len(messages)}", "type": "function",
                "function": {"name": "play", "arguments": json.dumps({"move": move})}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": call["id"], "content": match.play(move)}]
    return art.Trajectory(messages_and_choices=messages, tools=TOOLS, reward=match.points / ROUNDS)
