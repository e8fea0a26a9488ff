// Episodes as chats: turns of the model, tool calls with their results, replies of the environment.

/** Returns all texts of a chat as one text, for search and list. */
function chatText(chat) {
  const texts = chat.turns.flatMap((turn) => [
    ...turn.opening.map(([, text]) => text), turn.reasoning, turn.text, ...turn.calls.flatMap(([call, result]) => [call, result]), ...turn.replies.map(([, text]) => text),
  ]);
  return [...texts, chat.error].filter(Boolean).join(" ");
}

/** Returns the turns of a chat. `colour`: returns the coloured tokens from one index to another, in place of the text. */
function chatTurns(chat, colour = null) {
  return element(
    "ol", { class: "chat" },
    chat.turns.map((turn, index) => chatTurn(turn, index, chat.turns.some((one) => one.reward), colour)),
    chat.error ? element("li", { class: "error" }, element("h4", { text: "error of the environment" }), element("pre", { dir: "auto", text: visible(chat.error) })) : null,
  );
}

function chatTurn(turn, index, hasRewards, colour) {
  const [from, to] = turn.tokens;
  const facts = [
    hasRewards ? `reward ${number(turn.reward)}` : null, plural(to - from, "token"), `engine ${duration(turn.engine_s)}`, `environment ${duration(turn.env_s)}`,
    turn.start_s >= 0.005 ? `start ${duration(turn.start_s)}` : null,
    turn.malformed ? plural(turn.malformed, "malformed call") : null,
  ];
  const body = colour ? [colour(from, to)] : [
    turn.reasoning ? foldedTexts("reasoning", [turn.reasoning]) : null,
    turn.text || !turn.calls.length ? element("pre", { class: "completion", dir: "auto", text: visible(turn.text) || "(empty)" }) : null,
  ];
  return element(
    "li", { class: "turn" },
    turn.new_sequence ? element("p", { class: "fork", text: "New sequence: earlier messages were rewritten." }) : null,
    turn.opening.map(chatMessage),
    element("p", { class: "turn-head" }, element("b", { text: `Turn ${index + 1}` }), element("span", { class: "aside", text: facts.filter(Boolean).join(" · ") })),
    body,
    turn.calls.map(([call, result, outcome]) => foldedTexts(callLine(call, result, outcome), [call, result].filter(Boolean), "call")),
    turn.replies.map(chatMessage),
  );
}

function chatMessage([role, text]) {
  return element("div", { class: "message" }, element("h4", { text: role }), element("pre", { dir: "auto", text: visible(text) }));
}

function callLine(call, result, outcome) {
  return [snippet(call, 90), result ? `→ ${snippet(result, 60)}` : null, outcome ? `(${outcome})` : null].filter(Boolean).join(" ");
}

/** Returns a line that a click unfolds to texts. */
function foldedTexts(line, texts, kind = null) {
  return element("details", { class: kind }, element("summary", { dir: "auto", text: line }), texts.map((text) => element("pre", { dir: "auto", text: visible(text) })));
}
