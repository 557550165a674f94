// A conversation of several turns with the @openai/agents package: node openai_agents.mjs PACKAGE_DIR URL API TURNS
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [folder, url, api, turns] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const agents = await load('@openai/agents');
const openai = await load('openai');

agents.setTracingDisabled(true);
agents.setOpenAIAPI(api);
const OpenAI = openai.OpenAI ?? openai.default;
agents.setDefaultOpenAIClient(new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 }));

const tool = (name) =>
  agents.tool({
    name,
    description: 'Looks something up.',
    parameters: {
      type: 'object',
      properties: { place: { type: 'string' } },
      required: ['place'],
      additionalProperties: true,
    },
    strict: false,
    execute: async ({ place }) => `found: ${place}`,
  });
const agent = new agents.Agent({
  name: 'tester',
  model: 'gpt-oss-test',
  instructions: 'Be brief.',
  tools: [tool('get_weather'), tool('search_notes')],
});

let history = [];
for (let turn = 0; turn < Number(turns); turn++) {
  history.push({ role: 'user', content: `question ${turn}` });
  const result = await agents.run(agent, history, { maxTurns: 12, stream: turn % 2 === 1 });
  if (turn % 2 === 1) {
    for await (const _ of result) { /* drain */ }
    await result.completed;
  }
  history = result.history;
  console.log(JSON.stringify({ turn, answer: result.finalOutput }));
}
